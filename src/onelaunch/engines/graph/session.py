"""A run on the graph engine: kernels are compiled and captured in graphs of many steps, which are then replayed.

No step needs Python: kernels read the run's position from the device, and the graph itself advances it. The host fills the row
order and the scalars once per epoch, reads the losses about twenty times per second, and responds to Ctrl-C then.
parameters.py says where the weights are stored meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from onelaunch.capture.graph import capturing
from onelaunch.device import chip_of
from onelaunch.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.engines.graph.buffers import make_buffers
from onelaunch.engines.graph.kernels.run_state import advance, fill_row_order
from onelaunch.engines.graph.parameters import Parameters
from onelaunch.engines.graph.plan.operations import VALIDATION
from onelaunch.engines.graph.plan.plan import describe, plan_step
from onelaunch.engines.graph.plan.stages import stages_of
from onelaunch.engines.graph.scalars import make_table
from onelaunch.engines.graph.step import Data, StepRunner
from onelaunch.engines.graph.transfer import Pending, Progress, correct_predictions, download, upload
from onelaunch.integers import clamp
from onelaunch.kernels.launch import compiling
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import permutation
from onelaunch.run.objective import has_accuracy, predictions_per_row, values_per_row
from onelaunch.run.spec import Spec
from onelaunch.run.step_scalars import batch_weights, step_scalars

REPLAY_SECONDS = 0.05  # of work between two reads of the losses
GRAPH_STEPS = (64, 8, 1)  # steps per graph; the longest graph that still fits is replayed


def optimizer_name(spec: Spec) -> str:
    """The name of the update in kernels/optimizer.py."""
    if spec.optimizer != "sgd":
        return spec.optimizer
    return "nesterov" if spec.nesterov else "momentum" if spec.momentum else "sgd"


class GraphSession:
    follows_model = False

    def __init__(
        self, run: Run, state: Mapping[str, torch.Tensor], *, capture: bool = True, memory: str | None = None,
        tma: bool = True,
    ) -> None:  # fmt: skip
        """Without `capture`, every step is launched kernel by kernel, which also works in Triton's interpreter. `memory`
        overrides the run's and may also be "malloc" (see buffers.py). Without `tma`, no kernel uses TMA descriptors: Triton
        cannot make them for memory that a graph allocates."""
        spec, network = run.spec, run.network
        memory = memory or spec.memory
        assert network is not None
        self.run, self.spec = run, spec
        self.precision = spec.compiled_precision
        self.stages = stages_of(network)
        self.batch = min(spec.batch_size, spec.rows)
        self._state_names = OPTIMIZERS[spec.optimizer].state_names(spec.momentum)
        chip = chip_of(run.device)
        chip = replace(chip, tma=chip.tma and tma and memory != "stream")
        rows, steps = self._window()
        self._step_plan = plan_step(
            self.stages, batch=self.batch, rows=rows, steps_per_epoch=steps,
            precision=self.precision, validation_rows=0 if run.validation is None else len(run.validation[0]),
            states=len(self._state_names), uint8_rows=run.x.dtype == torch.uint8,
            clips=spec.clip_norm is not None, chip=chip,
        )  # fmt: skip
        layout = self._step_plan.layout()
        self.plan = describe(network, self._step_plan, self.precision, layout)
        self.buffers = make_buffers(memory, self._step_plan, layout, run.device)
        for name in self._step_plan.buffers:
            if name.startswith("tickets."):
                self.buffers.take(name).zero_()
        self.parameters = Parameters(
            run.model, self.stages, self._step_plan, self.buffers, self._state_names, state
        )  # fmt: skip
        self.runner = StepRunner(
            self._step_plan, self.stages, self.parameters.weights, self.buffers,
            optimizer=optimizer_name(spec), loss=spec.loss, batch=self.batch, tf32=self.precision == "tf32", seed=spec.seed,
            norms=self.parameters.norms, gradients=self.parameters.gradients(),
        )  # fmt: skip
        self._banks, self._bank = self._make_banks(), 0
        self._weights = None if run.weights is None else run.weights.cpu().numpy()
        self._sums: dict[int, np.ndarray[Any, Any]] = {}  # of the weights per batch, by epoch
        if run.validation is not None:
            self.validation = self._validation_data()
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by bank and number of steps
        self._capture = capture
        self._closed = False
        self._step_seconds = 0.0
        self.allocations: dict[str, int] = {}
        if capture:
            self._prepare()
        self._count(0)

    @property
    def data(self) -> Data:
        """The rows that the next steps read."""
        return self._banks[self._bank]

    def _window(self) -> tuple[int, int]:
        """Rows on the device, and steps until they have all been visited."""
        return self.spec.rows, self.spec.steps_per_epoch

    def _make_banks(self) -> list[Data]:
        """The rows on the device, in one bank that never changes."""
        x = self.run.x.flatten(1)
        if "data" in self._step_plan.buffers:
            x = self.buffers.take("data").copy_(x)
        return [replace(self._data(x, self.run.y, ""), weights=self.run.weights)]

    def snapshot(self) -> State:
        self.parameters.write_back()
        return self.parameters.state()

    def _data(self, x: torch.Tensor, y: torch.Tensor, prefix: str) -> Data:
        take = self.buffers.take
        return Data(
            x.contiguous(), y.contiguous(), take(f"{prefix}order"), take(f"{prefix}control"), take(f"{prefix}table"),
            prefix,
        )  # fmt: skip

    def _validation_data(self) -> Data:
        """The validation data in batches, each with the row weight of all of it: their losses add up to the mean."""
        assert self.run.validation is not None
        data = self._data(*self.run.validation, VALIDATION)
        rows, batch = len(data.x), self._step_plan.validation_batch
        data.order.copy_(torch.arange(rows, dtype=torch.int32))
        first_rows = np.arange(0, rows, batch)
        row_weight = np.full(len(first_rows), 1 / (rows * values_per_row(self.spec, self.run.outputs)))
        steps = {"row_weight": row_weight, "rows": np.minimum(batch, rows - first_rows)}
        data.table.copy_(make_table(self.spec, len(data.table), steps))
        return data

    def _begin(self, step: int) -> None:
        """Sets the row order and scalars of the step's epoch, and the position to the step. Does not wait for the device."""
        spec, data = self.spec, self.data
        epoch = spec.epoch_of(step)
        fill_row_order(data.order, self.buffers.take("keys"), spec.seed, epoch)
        first, end = epoch * spec.steps_per_epoch, spec.epoch_end(step)
        self._note_weights(epoch)
        sums = self._sums[epoch][: end - first] if epoch in self._sums else None
        scalars = step_scalars(spec, first, end - first, self.run.outputs, sums)
        upload(make_table(spec, len(data.table), scalars), data.table)
        upload(torch.tensor([step - first, step, 0, 0]), data.control)  # as CONTROL; no correct predictions yet

    def _note_weights(self, epoch: int) -> None:
        """Keep the summed row weights of the epoch's batches, where rows are weighted; the epoch before it may still run."""
        if self._weights is not None:
            order = permutation(self.spec.rows, self.spec.seed, epoch).numpy()
            self._sums = {**self._sums, epoch: batch_weights(self.spec, self._weights, order)}
            self._sums.pop(epoch - 2, None)

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        step, ahead = first_step, None
        while step < self.spec.total_steps:
            with torch.no_grad(), torch.cuda.device_of(self.run.y):
                if ahead is None and not self._is_short(step):
                    segment = self._segment(step, monitor)
                else:
                    now = ahead or self._queue_epoch(step)
                    # Queue the next epoch before waiting for the results of this one.
                    more = now.end < self.spec.total_steps and not monitor.stop
                    ahead = self._queue_epoch(now.end) if more else None
                    segment = self._result(now)
                    monitor.report(now.end, float(segment.losses[-1]), segment.correct)
            yield segment
            step += len(segment.losses)

    def _is_short(self, step: int) -> bool:
        """Whether to queue epochs one ahead of the results that the host has read: they end before a user could request a stop,
        and no checkpoint is taken in between."""
        spec = self.spec
        seconds = self._step_seconds * spec.steps_per_epoch
        whole = step % spec.steps_per_epoch == 0
        return self._capture and not self.run.checkpoints and whole and 0 < seconds < 2 * REPLAY_SECONDS

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        """One epoch, or the rest of it: the host queues work while the device does the work queued before."""
        spec = self.spec
        end, epoch_first = spec.epoch_end(first_step), spec.epoch_of(first_step) * spec.steps_per_epoch
        calls = self.buffers.calls
        self._begin(first_step)
        losses = self.buffers.take("losses")
        step, reads, seen = first_step, deque[Progress](), time.perf_counter()
        while step < end or reads:
            if step < end and not monitor.stop:
                queued = self._advance(end - step)
                step += queued
                loss_of_step = losses[step - epoch_first - 1 : step - epoch_first]
                reads.append(Progress(step, queued, loss_of_step, self.data.control))
                if len(reads) < 2 and step < end:
                    continue
            elif not reads:
                break
            progress = reads.popleft()
            loss, correct = progress.wait()
            now = time.perf_counter()
            if progress.step - progress.queued > first_step:  # the first step may have compiled its kernels
                self._step_seconds = (now - seen) / progress.queued
            seen = now
            monitor.report(progress.step, loss, correct if has_accuracy(spec) else None)
            if not np.isfinite(loss):
                break
        pending = Pending(first_step, step, losses[first_step - epoch_first : step - epoch_first], self.data.control)
        if step == end and self.run.validation is not None:
            pending.validation = self._queue_evaluation()
        pending.close()
        self._count(self.buffers.calls - calls)
        return self._result(pending)

    def _queue_epoch(self, first_step: int) -> Pending:
        """Queues an epoch and the copies of its results to the host."""
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
        counts, metrics = has_accuracy(self.spec), None
        if pending.validation is not None:
            losses, control = pending.validation
            loss = float(losses.double().sum())
            predictions = len(self.validation.x) * predictions_per_row(self.spec, self.run.outputs)
            metrics = Metrics(loss, correct_predictions(control) / predictions if counts else None)
        correct = correct_predictions(pending.control) if counts else None
        return Segment(pending.first_step, pending.losses, correct, metrics, self._batch_weights(pending))

    def _batch_weights(self, pending: Pending) -> torch.Tensor | None:
        """The summed row weights of the steps that `pending` waits for, where rows are weighted."""
        epoch = self.spec.epoch_of(pending.first_step)
        if epoch not in self._sums:
            return None
        first = pending.first_step - epoch * self.spec.steps_per_epoch
        return torch.from_numpy(self._sums[epoch][first : first + len(pending.losses)])

    def train_steps(self, count: int) -> None:
        """Queues the first `count` steps of an epoch again, for benchmarks; does not wait for the device."""
        with torch.no_grad():
            self._begin(0)
            self._queue(min(count, self.spec.steps_per_epoch))

    def _advance(self, max_steps: int) -> int:
        """Queues about REPLAY_SECONDS of work, at most `max_steps` steps, and returns the number of steps."""
        steps = int(REPLAY_SECONDS / self._step_seconds) if self._step_seconds else 1
        steps = clamp(1, steps, max_steps)
        self._queue(steps)
        return steps

    def _prepare(self) -> None:
        """Compiles the kernels and captures the graphs, so that their time counts as the start of the run."""
        with torch.no_grad(), torch.cuda.device_of(self.run.y):
            with compiling():
                self.runner.train(self.data, 0)
                for steps in GRAPH_STEPS:  # a different kernel for each; none may be loaded during a capture
                    advance(self.data.control, steps)
            for bank in range(len(self._banks)):
                self._bank = bank
                for steps in GRAPH_STEPS:
                    if steps <= self._window()[1]:
                        self._graph(steps)
            self._bank = 0

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
        if (self._bank, steps) not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                for number in range(steps):
                    self.runner.train(self.data, number)
                advance(self.data.control, steps)
            self._graphs[self._bank, steps] = graph
        return self._graphs[self._bank, steps]

    def _queue_evaluation(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Queues the evaluation of the validation data; returns its losses and `control`, being copied to the host."""
        data = self.validation
        if self._step_plan.narrow:
            self.parameters.write_back()
        data.control.zero_()
        for number in range(len(data.table) - 1):
            self.runner.evaluate(data, number)
        return download(self.buffers.take(f"{VALIDATION}losses")), download(data.control)

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
