"""A run on the graph engine: the first step launch by launch, which compiles its kernels, then graphs of many steps replayed.

Nothing of a step comes from Python: kernels read where the run is from the device, which the graph itself moves on. The host
fills the row order and the scalars once an epoch, looks at the losses about twenty times a second, and answers Ctrl-C then.
The fp32 weights are the model's own parameters, updated in place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from math import prod

import numpy as np
import torch

from onelaunch.kernels.run_arguments import HYPER, WIDTH, Weights
from onelaunch.kernels.run_state import advance, fill_row_order
from onelaunch.train.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.train.engines.graph.buffers import make_buffers
from onelaunch.train.engines.graph.plan import describe, plan_step
from onelaunch.train.engines.graph.scalars import hyperparameters, step_lines
from onelaunch.train.engines.graph.stages import stages_of
from onelaunch.train.engines.graph.step import Data, StepRunner
from onelaunch.train.objective import predictions_per_row

REPLAY_SECONDS = 0.05  # of work between two looks at the losses
GRAPH_STEPS = (64, 8, 1)  # of the graphs; the longest that still fits is replayed
STATES = {"sgd": (), "momentum": ("momentum",), "nesterov": ("momentum",)}


def optimizer_name(run: Run) -> str:
    """The update as the kernels call it."""
    spec = run.spec
    if spec.optimizer != "sgd":
        return spec.optimizer
    return "nesterov" if spec.nesterov else "momentum" if spec.momentum else "sgd"


class GraphSession:
    def __init__(
        self, run: Run, state: Mapping[str, torch.Tensor], *, capture: bool = True, memory: str | None = None
    ) -> None:
        """Without `capture` every step is launched kernel by kernel, which Triton's interpreter can do too. `memory`, in place
        of the run's, may also be "malloc" (see buffers)."""
        spec, network = run.spec, run.network
        assert network is not None
        self.run, self.spec = run, spec
        self.precision = "tf32" if spec.precision == "auto" else spec.precision
        self.stages = stages_of(network)
        self.batch = min(spec.batch_size, spec.rows)
        self._optimizer = optimizer_name(run)
        self._state_names = STATES.get(self._optimizer, ("exp_avg", "exp_avg_sq"))
        check_rows = 0 if run.validation is None else len(run.validation[0])
        self._step_plan = plan_step(
            self.stages, batch=self.batch, rows=spec.rows, steps_per_epoch=spec.steps_per_epoch,
            precision=self.precision, check_rows=check_rows, states=len(self._state_names),
            processors=_processors(run.device), images=run.x.dtype == torch.uint8,
        )  # fmt: skip
        layout = self._step_plan.layout()
        self.plan = describe(network, self._step_plan, self.precision, layout)
        self.buffers = make_buffers(memory or spec.memory, self._step_plan, layout, run.device)
        self._parameters = dict(run.model.named_parameters())
        self._masters = {name: p.detach().contiguous() for name, p in self._parameters.items()}
        if self._step_plan.narrow:
            for place in range(len(self._state_names)):
                self.buffers.take(f"state{place}.packed").zero_()
            self._pack()
        for name in self._step_plan.spaces:
            if name.startswith("tickets."):
                self.buffers.take(name).zero_()
        self.weights = [self._weights(number, state) for number in range(len(self.stages))]
        self.runner = StepRunner(
            self._step_plan, self.stages, self.weights, self.buffers, optimizer=self._optimizer, loss=spec.loss,
            batch=self.batch, tf32=self.precision == "tf32", seed=spec.seed,
        )  # fmt: skip
        x = run.x.flatten(1)
        if "data" in self._step_plan.spaces:
            x = self.buffers.take("data").copy_(x)
        self.data = self._data(x, run.y, "")
        if run.validation is not None:
            self.check = self._check_data()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._graph_calls: dict[int, int] = {}
        self._capture, self._warm = capture, False
        self._closed = False
        self._step_seconds = 0.0
        self.allocations: dict[str, int] = {}
        self._count(0)

    # Weights and optimizer state.

    def _weights(self, number: int, state: Mapping[str, torch.Tensor]) -> Weights:
        linear = self.stages[number].linear
        tensors: dict[str, torch.Tensor | None] = {}
        for part in ("weight", "bias") if linear.bias else ("weight",):
            name = f"{linear.path}.{part}"
            tensors[part] = self._masters[name]
            for place, kind in zip(("first", "second"), self._state_names, strict=False):
                kept = self._kept_state(self._state_names.index(kind), number, part)
                saved = state.get(f"{kind}.{name}")
                if saved is None:
                    kept.zero_()
                else:
                    kept.copy_(saved)
                tensors[f"{part}_{place}"] = kept
        weight = tensors["weight"]
        assert weight is not None
        if f"copy.{number}" in self._step_plan.spaces:
            tensors["copy"] = self.buffers.take(f"copy.{number}").copy_(weight)
        return Weights(**{"bias": None, **tensors})  # type: ignore[arg-type]

    def _kept_state(self, state: int, number: int, part: str) -> torch.Tensor:
        if self._step_plan.narrow:
            return self._packed(f"state{state}.packed", number, part)
        return self.buffers.take(f"state{state}.{number}.{part}")

    def _packed(self, buffer: str, number: int, part: str) -> torch.Tensor:
        """A parameter's place in one of the narrow step's vectors, without the padding."""
        assert self._step_plan.narrow is not None
        offset, padded, shape = self._step_plan.narrow.place(number, part)
        whole = self.buffers.take(buffer)[offset : offset + prod(padded)].view(padded)
        return whole[tuple(slice(size) for size in shape)]

    def _pack(self) -> None:
        take, spaces = self.buffers.take, self._step_plan.spaces
        take("packed").zero_()
        for number, part, name in self._parts():
            self._packed("packed", number, part).copy_(self._masters[name])
        if "packed_copy" in spaces:
            take("packed_copy").copy_(take("packed"))

    def _parts(self) -> Iterator[tuple[int, str, str]]:
        """(stage, weight or bias, the parameter's name)"""
        for number, stage in enumerate(self.stages):
            for part in ("weight", "bias") if stage.linear.bias else ("weight",):
                yield number, part, f"{stage.linear.path}.{part}"

    def snapshot(self) -> State:
        self._write_back()
        return {
            f"{kind}.{name}": self._kept_state(place, number, part).clone(memory_format=torch.contiguous_format)
            for number, part, name in self._parts()
            for place, kind in enumerate(self._state_names)
        }

    def _write_back(self) -> None:
        """The weights into the model, where it does not hold them already."""
        with torch.no_grad():
            for number, part, name in self._parts():
                if self._step_plan.narrow:
                    self._masters[name].copy_(self._packed("packed", number, part))
                if self._masters[name].data_ptr() != self._parameters[name].data_ptr():  # it was not contiguous
                    self._parameters[name].copy_(self._masters[name])

    # The data, and what the kernels read of the run.

    def _data(self, x: torch.Tensor, y: torch.Tensor, prefix: str) -> Data:
        take = self.buffers.take
        return Data(
            x.contiguous(), y.contiguous(), take(f"{prefix}order"), take(f"{prefix}control"), take(f"{prefix}table"),
            prefix,
        )  # fmt: skip

    def _check_data(self) -> Data:
        assert self.run.validation is not None
        data = self._data(*self.run.validation, "check.")
        rows, part = len(data.x), self._step_plan.check_part
        data.order.copy_(torch.arange(rows, dtype=torch.int32))
        lines = np.zeros((len(data.table), WIDTH))
        lines[0, : len(HYPER)] = hyperparameters(self.spec)
        values = rows if self.spec.loss == "cross_entropy" else rows * self.run.outputs
        for number in range(len(lines) - 1):
            lines[number + 1, :5] = (1 / values, 0, 0, 0, min(part, rows - number * part))
        data.table.copy_(torch.from_numpy(lines))
        return data

    def _begin(self, step: int) -> None:
        """Row order and scalars of the step's epoch, and the clock at the step."""
        spec, data = self.spec, self.data
        epoch = spec.epoch_of(step)
        fill_row_order(data.order, self.buffers.take("keys"), spec.seed, epoch)
        first, end = epoch * spec.steps_per_epoch, spec.epoch_end(step)
        lines = np.zeros((len(data.table), WIDTH))
        lines[0, : len(HYPER)] = hyperparameters(spec)
        lines[1 : 1 + end - first] = step_lines(spec, first, end - first, self.run.outputs)
        data.table.copy_(torch.from_numpy(lines))
        data.control.copy_(torch.tensor([step - first, step, 0, 0]))

    # Training.

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        step = first_step
        while step < self.spec.total_steps:
            with torch.no_grad(), torch.cuda.device_of(self.run.x):
                segment = self._segment(step, monitor)
            yield segment
            step += len(segment.losses)

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        spec = self.spec
        end, epoch_first = spec.epoch_end(first_step), spec.epoch_of(first_step) * spec.steps_per_epoch
        counts = spec.loss != "mse"
        calls = self.buffers.calls
        self._begin(first_step)
        losses = self.buffers.take("losses")
        step = first_step
        while step < end:
            begin = time.perf_counter()
            done = self._advance(end - step)
            step += done
            loss = float(losses[step - epoch_first - 1])  # waits for the device
            if step - done > first_step:  # the first may have compiled and captured
                self._step_seconds = (time.perf_counter() - begin) / done
            right = int(self.data.control[2]) if counts else None
            monitor.report(step, loss, right)
            if monitor.stop or not np.isfinite(loss):
                break
        validation = self._evaluate() if step == end and self.run.validation is not None else None
        right = int(self.data.control[2]) if counts else None
        self._count(self.buffers.calls - calls)
        return Segment(
            first_step, losses[first_step - epoch_first : step - epoch_first].to("cpu", copy=True), right, validation
        )

    def train_steps(self, count: int) -> None:
        """Queue the first `count` steps of an epoch once more, for benchmarks; nothing waits for the device."""
        with torch.no_grad():
            self._begin(0)
            self._queue(min(count, self.spec.steps_per_epoch))

    def _advance(self, most: int) -> int:
        """Queues up to `most` steps, about REPLAY_SECONDS of them, and returns how many."""
        wanted = int(REPLAY_SECONDS / self._step_seconds) if self._step_seconds else 1
        wanted = max(1, min(most, wanted))
        self._queue(wanted)
        return wanted

    def _queue(self, count: int) -> None:
        while count:
            if self._warm and self._capture:
                steps = next(size for size in GRAPH_STEPS if size <= count)
                self._graph(steps).replay()
            else:
                steps = 1
                self.runner.train(self.data, 0)
                advance(self.data.control, 1)
                self._warm = True
            count -= steps

    def _graph(self, steps: int) -> torch.cuda.CUDAGraph:
        if steps not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for number in range(steps):
                    self.runner.train(self.data, number)
                advance(self.data.control, steps)
            self._graphs[steps] = graph
        return self._graphs[steps]

    def _evaluate(self) -> Metrics:
        data = self.check
        if self._step_plan.narrow:
            self._write_back()
        data.control.zero_()
        for number in range(len(data.table) - 1):
            self.runner.evaluate(data, number)
        loss = float(self.buffers.take("check.losses").double().sum())
        if self.spec.loss == "mse":
            return Metrics(loss, None)
        predictions = len(data.x) * predictions_per_row(self.spec, self.run.outputs)
        return Metrics(loss, int(data.control[2]) / predictions)

    def _count(self, calls: int) -> None:
        self.allocations.setdefault("before the first step", self.buffers.calls)
        self.allocations["in the last epoch"] = calls
        self.allocations["in all"] = self.buffers.calls
        self.allocations["peak bytes"] = self.buffers.peak_bytes

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._write_back()
            self._graphs.clear()
            self.buffers.close()


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
