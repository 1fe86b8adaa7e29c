"""A run on the graph engine: the first step launch by launch, which compiles its kernels, then graphs of many steps replayed.

Nothing of a step comes from Python: kernels read where the run is from the device, which the graph itself moves on. The host
fills the row order and the scalars once an epoch, looks at the losses about twenty times a second, and answers Ctrl-C then.
Where the weights lie meanwhile: parameters.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from onelaunch.capture import capturing
from onelaunch.device import chip_of
from onelaunch.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.engines.graph.buffers import make_buffers
from onelaunch.engines.graph.kernels.run_arguments import HYPER, WIDTH
from onelaunch.engines.graph.kernels.run_state import advance, fill_row_order
from onelaunch.engines.graph.parameters import Parameters
from onelaunch.engines.graph.plan.plan import describe, plan_step
from onelaunch.engines.graph.plan.stages import stages_of
from onelaunch.engines.graph.scalars import hyperparameters, step_lines
from onelaunch.engines.graph.step import Data, StepRunner
from onelaunch.engines.graph.transfer import Look, Pending, download, upload
from onelaunch.kernels.launch import compiling
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.objective import predictions_per_row

REPLAY_SECONDS = 0.05  # of work between two looks at the losses
GRAPH_STEPS = (64, 8, 1)  # of the graphs; the longest that still fits is replayed


def optimizer_name(run: Run) -> str:
    """The update as the kernels call it."""
    spec = run.spec
    if spec.optimizer != "sgd":
        return spec.optimizer
    return "nesterov" if spec.nesterov else "momentum" if spec.momentum else "sgd"


class GraphSession:
    def __init__(
        self, run: Run, state: Mapping[str, torch.Tensor], *, capture: bool = True, memory: str | None = None,
        tma: bool = True,
    ) -> None:  # fmt: skip
        """Without `capture` every step is launched kernel by kernel, which Triton's interpreter can do too. `memory`, in place
        of the run's, may also be "malloc" (see buffers). Without `tma` no tile is described to the tensor memory accelerator:
        Triton's way of doing so does not take memory that a graph allocates."""
        spec, network = run.spec, run.network
        memory = memory or spec.memory
        assert network is not None
        self.run, self.spec = run, spec
        self.precision = spec.compiled_precision
        self.stages = stages_of(network)
        self.batch = min(spec.batch_size, spec.rows)
        self._optimizer = optimizer_name(run)
        self._state_names = OPTIMIZERS[spec.optimizer].state_names(spec.momentum)
        check_rows = 0 if run.validation is None else len(run.validation[0])
        chip = chip_of(run.device)
        chip = replace(chip, tma=chip.tma and tma and memory != "stream")
        self._step_plan = plan_step(
            self.stages, batch=self.batch, rows=spec.rows, steps_per_epoch=spec.steps_per_epoch,
            precision=self.precision, check_rows=check_rows, states=len(self._state_names),
            images=run.x.dtype == torch.uint8, chip=chip,
        )  # fmt: skip
        layout = self._step_plan.layout()
        self.plan = describe(network, self._step_plan, self.precision, layout)
        self.buffers = make_buffers(memory, self._step_plan, layout, run.device)
        for name in self._step_plan.spaces:
            if name.startswith("tickets."):
                self.buffers.take(name).zero_()
        self.parameters = Parameters(
            run.model, self.stages, self._step_plan, self.buffers, self._state_names, state
        )  # fmt: skip
        self.runner = StepRunner(
            self._step_plan, self.stages, self.parameters.weights, self.buffers, optimizer=self._optimizer, loss=spec.loss,
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
        self._capture = capture
        self._closed = False
        self._step_seconds = 0.0
        self.allocations: dict[str, int] = {}
        if capture:
            self._prepare()
        self._count(0)

    def snapshot(self) -> State:
        self.parameters.write_back()
        return self.parameters.state()

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
        """Row order and scalars of the step's epoch, and the clock at the step. Nothing here waits for the device."""
        spec, data = self.spec, self.data
        epoch = spec.epoch_of(step)
        fill_row_order(data.order, self.buffers.take("keys"), spec.seed, epoch)
        first, end = epoch * spec.steps_per_epoch, spec.epoch_end(step)
        lines = np.zeros((len(data.table), WIDTH))
        lines[0, : len(HYPER)] = hyperparameters(spec)
        lines[1 : 1 + end - first] = step_lines(spec, first, end - first, self.run.outputs)
        upload(torch.from_numpy(lines.astype(np.float32)), data.table)
        upload(torch.tensor([step - first, step, 0, 0]), data.control)

    # Training.

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        step, ahead = first_step, None
        while step < self.spec.total_steps:
            with torch.no_grad(), torch.cuda.device_of(self.run.x):
                if ahead is None and not self._is_short(step):
                    segment = self._segment(step, monitor)
                else:
                    now = ahead or self._queue_epoch(step)
                    # The next epoch is under way before this one's results are looked at.
                    more = now.end < self.spec.total_steps and not monitor.stop
                    ahead = self._queue_epoch(now.end) if more else None
                    segment = self._result(now)
                    monitor.report(now.end, float(segment.losses[-1]), segment.correct)
            yield segment
            step += len(segment.losses)

    def _is_short(self, step: int) -> bool:
        """Whether epochs from here on are run one ahead of what the host has seen: they end before anyone could ask to stop,
        and no checkpoint is to be taken in between."""
        spec = self.spec
        seconds = self._step_seconds * spec.steps_per_epoch
        whole = step % spec.steps_per_epoch == 0
        return self._capture and not self.run.checkpoints and whole and 0 < seconds < 2 * REPLAY_SECONDS

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        """One epoch, or what is left of it: work is queued while the device does the work queued before."""
        spec = self.spec
        end, epoch_first = spec.epoch_end(first_step), spec.epoch_of(first_step) * spec.steps_per_epoch
        calls = self.buffers.calls
        self._begin(first_step)
        losses = self.buffers.take("losses")
        step, looks, seen = first_step, deque[Look](), time.perf_counter()
        while step < end or looks:
            if step < end and not monitor.stop:
                done = self._advance(end - step)
                step += done
                looks.append(Look(step, done, losses[step - epoch_first - 1 : step - epoch_first], self.data.control))
                if len(looks) < 2 and step < end:
                    continue
            elif not looks:
                break
            look = looks.popleft()
            loss, right = look.wait()
            now = time.perf_counter()
            if look.step - look.done > first_step:  # the first step may have compiled its kernels
                self._step_seconds = (now - seen) / look.done
            seen = now
            monitor.report(look.step, loss, right if spec.loss != "mse" else None)
            if not np.isfinite(loss):
                break
        pending = Pending(first_step, step, losses[first_step - epoch_first : step - epoch_first], self.data.control)
        if step == end and self.run.validation is not None:
            pending.validation = self._queue_evaluation()
        pending.close()
        self._count(self.buffers.calls - calls)
        return self._result(pending)

    def _queue_epoch(self, first_step: int) -> Pending:
        """All of an epoch, and the way back of its results."""
        end, calls = self.spec.epoch_end(first_step), self.buffers.calls
        self._begin(first_step)
        self._queue(end - first_step)
        losses = self.buffers.take("losses")[: end - first_step]
        pending = Pending(first_step, end, losses, self.data.control)
        if self.run.validation is not None:
            pending.validation = self._queue_evaluation()
        pending.close()
        self._count(self.buffers.calls - calls)
        return pending

    def _result(self, pending: Pending) -> Segment:
        pending.wait()
        counts = self.spec.loss != "mse"
        metrics = None
        if pending.validation is not None:
            losses, control = pending.validation
            loss = float(losses.double().sum())
            predictions = len(self.check.x) * predictions_per_row(self.spec, self.run.outputs)
            metrics = Metrics(loss, int(control[2]) / predictions if counts else None)
        return Segment(pending.first_step, pending.losses, int(pending.control[2]) if counts else None, metrics)

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

    def _prepare(self) -> None:
        """Kernels and graphs, before the first step: what they take belongs to the start of the run."""
        with torch.no_grad(), torch.cuda.device_of(self.run.x):
            with compiling():
                self.runner.train(self.data, 0)
                for steps in GRAPH_STEPS:  # kernels of their own, none of which should load during a capture
                    advance(self.data.control, steps)
            for steps in GRAPH_STEPS:
                if steps <= self.spec.steps_per_epoch:
                    self._graph(steps)

    def _queue(self, count: int) -> None:
        while count:
            if self._capture:
                steps = next(size for size in GRAPH_STEPS if size <= count)
                self._graph(steps).replay()
            else:
                steps = 1
                self.runner.train(self.data, 0)
                advance(self.data.control, 1)
            count -= steps

    def _graph(self, steps: int) -> torch.cuda.CUDAGraph:
        if steps not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                for number in range(steps):
                    self.runner.train(self.data, number)
                advance(self.data.control, steps)
            self._graphs[steps] = graph
        return self._graphs[steps]

    def _queue_evaluation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The validation data through the network; its losses and right predictions on their way to the host."""
        data = self.check
        if self._step_plan.narrow:
            self.parameters.write_back()
        data.control.zero_()
        for number in range(len(data.table) - 1):
            self.runner.evaluate(data, number)
        return download(self.buffers.take("check.losses")), download(data.control)

    def _count(self, calls: int) -> None:
        self.allocations.setdefault("before the first step", self.buffers.calls)
        self.allocations["in the last epoch"] = calls
        self.allocations["in all"] = self.buffers.calls
        self.allocations["peak bytes"] = self.buffers.peak_bytes

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.parameters.write_back()
            self._graphs.clear()
            self.buffers.close()
