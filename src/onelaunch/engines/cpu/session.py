"""A run on the CPU engine: copy the weights into the arena, train in native calls of about 50 ms, copy the weights back.

The main thread returns to Python after every call, so that signals, progress and requests to stop are served between two
steps. Scalars that PyTorch computes in double precision (learning rate, bias corrections) are computed here, per call.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onelaunch.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.engines.cpu.arena import Arena
from onelaunch.engines.cpu.cache import OBJECTS
from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.units import ROW_ORDER
from onelaunch.engines.cpu.native import library
from onelaunch.engines.cpu.plan.layout import MAX_CALL_STEPS
from onelaunch.engines.cpu.plan.settings import MIN_VALIDATION_BATCH, SCALARS, TALLY, Settings, useful_partitions
from onelaunch.engines.cpu.plan.target import Target, host
from onelaunch.engines.cpu.program.program import program_for
from onelaunch.engines.cpu.program.table import Table
from onelaunch.engines.cpu.threads import SPINS_BEFORE_YIELD, Team
from onelaunch.integers import ceil_div, clamp
from onelaunch.operating_system import yield_address
from onelaunch.optimizers import constants
from onelaunch.rng import permutation_bits, signed_seed
from onelaunch.run.network import tensor_name
from onelaunch.run.objective import has_accuracy
from onelaunch.run.step_scalars import batch_weights, step_scalars

CALL_SECONDS = 0.05  # target duration of a native call: Python serves signals and progress between calls
PROBE_SECONDS = 0.005  # of a probe, which compares one thread with several: short, since half of the probes are slower
# Buffers that are zero at first; a partition without rows never writes its losses.
ZEROED = ("parameters", "flag", "tally", "losses", "mean", "variance", "ticks", "zeros", "squares")
PLANES = {"bf16": 1, "tf32": 2}  # of operands in bf16, by precision
FIRST_STEPS = 8  # in the first call, before the time per step is known


def settings_for(run: Run, partitions: int | None = None) -> Settings:
    """What the program of a run depends on. `partitions` defaults to a choice by network size and the run's threads."""
    spec, network = run.spec, run.network
    assert network is not None
    batch, validates = min(spec.batch_size, spec.rows), run.validation is not None
    return Settings(
        network=network,
        batch=batch,
        validation_batch=max(MIN_VALIDATION_BATCH, batch) if validates else MIN_VALIDATION_BATCH,
        partitions=partitions or useful_partitions(network, batch, run.threads or torch.get_num_threads()),
        optimizer=spec.optimizer,
        momentum=spec.momentum > 0,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay > 0,
        loss=spec.loss,
        label_smoothing=spec.label_smoothing > 0,
        uint8_rows=run.x.dtype == torch.uint8,
        weighted=run.weights is not None,
        clips=spec.clip_norm is not None,
        validates=validates,
        planes=PLANES.get(spec.precision, 0),
    )


class CpuSession:
    follows_model = False

    def __init__(
        self, run: Run, state: Mapping[str, torch.Tensor], *, partitions: int | None = None, target: Target | None = None,
        cache_folder: Path | None = None, memory: Any = None,
    ) -> None:  # fmt: skip
        """The keyword arguments are for tests: the number of partitions, target, cache folder and memory of the arena."""
        self.run, self.spec = run, run.spec
        self.program = program_for(settings_for(run, partitions), target or host())
        self.precision = run.spec.precision if self.program.plan.settings.planes else "fp32"
        self._plan = self.program.plan
        self.plan = self.program.description
        self.library = library(self._plan.target, cache_folder or OBJECTS.folder())
        self.compiled = self.library.load(self.program.units)  # what was neither in memory nor on disk
        self.arena = Arena(self._plan, self.spec.rows, memory)
        self.allocations = {"arena": 1}
        self._scalars = self.arena.view("scalars").reshape(-1, len(SCALARS))
        self._loss_sums, self._tallies = self._views("losses", np.float64), self._views("tally", np.int64)
        self.team = Team(
            self._plan.partitions, lambda: self.arena.set_words("control", SPINS_BEFORE_YIELD, yield_address(), 1)
        )
        self._tensors = dict(run.model.state_dict(keep_vars=True))
        self._done = 0  # steps of the run that the arena's weights have seen
        # Whether the arena has the weights after whole steps, at least one. A call that is interrupted leaves a mix of two.
        self._has_results = False
        self._step_seconds = 0.0
        self._weight_sums: np.ndarray[Any, Any] | None = None  # of each batch of the epoch, where rows are weighted
        self._load(state)
        self._table = Table(self.program.template, self.library.address, self.arena.address, self._outside())
        enter = self.library.function(driver.UNIT, driver.RUN, ctypes.c_void_p, ctypes.c_void_p)
        self._entries = {name: partial(enter, fields, None) for name, fields in self._table.entries.items()}
        self._row_order = self.library.function(ROW_ORDER, "row_order", ctypes.c_void_p, *[ctypes.c_int64] * 4)

    def _outside(self) -> dict[str, int]:
        """The addresses and numbers of the run that its program reads outside the arena. Also sets its constants inside."""
        spec, run, order = self.spec, self.run, self.arena.order.ctypes.data
        x, y = run.x.contiguous(), run.y.contiguous()
        self._kept = [x, y]  # kept alive: the native code has their addresses
        outside = {
            "x": x.data_ptr(),
            "y": y.data_ptr(),
            "rows": spec.rows,
            "order": order,
            "seed": signed_seed(spec.seed),
        }
        if run.validation is not None:
            x, y = (tensor.contiguous() for tensor in run.validation)
            self._kept += [x, y]
            outside |= {"validation_x": x.data_ptr(), "validation_y": y.data_ptr(), "validation_rows": len(x)}
            self.arena.set_words("call.validate", ceil_div(len(x), self._plan.settings.validation_batch), 0, 0)
        if run.weights is not None:
            self._kept.append(run.weights.contiguous())
            outside["weights"] = self._kept[-1].data_ptr()
        self.arena.set_words("control", SPINS_BEFORE_YIELD, yield_address(), 0)
        self.arena.set_hyperparameters(
            **constants(spec), label_smoothing=spec.label_smoothing, clip_norm=spec.clip_norm or 0.0
        )  # fmt: skip
        return outside

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        plan, arena = self._plan, self.arena
        if not arena.is_zero:
            for name in plan.buffers:
                if name.split(".")[0] in ZEROED:
                    arena.view(name, np.uint8)[:] = 0
        for stage in plan.stages:
            for number in (*stage.batch_norms, *stage.layer_norms):
                arena.view(f"scale.{stage.index}.{number}")[: stage.width] = 1  # for a norm without a weight
        for parameter in plan.parameters:
            arena.write(parameter.buffer, self._tensors[parameter.name].detach().numpy())
            for number, kind in enumerate(plan.settings.state_names if parameter.trained else ()):
                saved = state.get(f"{kind}.{parameter.name}")
                if saved is not None:
                    arena.write(parameter.buffer, saved.detach().cpu().float().numpy(), self._shift(number))
        arena.is_zero = False

    def _shift(self, state: int) -> int:
        return (state + 1) * self._plan.state_stride

    def snapshot(self) -> State:
        self._write_back()
        state: State = {}
        for parameter in self._plan.parameters:
            for number, kind in enumerate(self._plan.settings.state_names if parameter.trained else ()):
                values = self.arena.read(parameter.buffer, parameter.inputs, parameter.outputs, self._shift(number))
                state[f"{kind}.{parameter.name}"] = torch.from_numpy(values)
        return state

    def _write_back(self) -> None:
        with torch.no_grad():
            for parameter in self._plan.parameters:
                values = self.arena.read(parameter.buffer, parameter.inputs, parameter.outputs)
                self._tensors[parameter.name].copy_(torch.from_numpy(values))
            for (stage, number), tensor in self._counters().items():
                first = self.arena.view(f"batches.{stage}.{number}", np.float64)[0]
                tensor.fill_(int(first) + self._done)

    def _counters(self) -> dict[tuple[int, int], torch.Tensor]:
        """`num_batches_tracked` of every BatchNorm1d that has one, by (stage, group)."""
        found = {}
        for stage in self._plan.stages:
            for number in stage.batch_norms:
                layer = stage.groups[number].batch_norm
                if layer and layer.tracks:
                    found[stage.index, number] = self._tensors[tensor_name(layer.path, "num_batches_tracked")]
        return found

    def _set_counters(self, first_step: int) -> None:
        self._done = first_step
        for (stage, number), tensor in self._counters().items():
            # Native code adds the step: `batches + step` is what the BatchNorm1d has seen.
            self.arena.view(f"batches.{stage}.{number}", np.float64)[0] = int(tensor) - first_step

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        self._set_counters(first_step)
        while self._done < self.spec.total_steps:
            yield self._segment(self._done, monitor)

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        spec = self.spec
        end = spec.epoch_end(first_step)
        self._fill_order(spec.epoch_of(first_step))
        epoch_first = spec.epoch_of(first_step) * spec.steps_per_epoch
        if self.run.weights is not None:
            self._weight_sums = batch_weights(spec, self.run.weights.numpy(), self.arena.order[: spec.rows])
        self._clear_tally("correct")
        losses = np.empty(end - first_step, np.float32)
        step, reported = first_step, time.perf_counter()
        while step < end:
            count = min(self._call_steps(), end - step)
            losses[step - first_step : step - first_step + count] = self._train(step, count)
            step += count
            self._done = step
            now = time.perf_counter()
            if now - reported > CALL_SECONDS / 2 or monitor.stop:
                reported = now
                monitor.report(step, float(losses[step - first_step - 1]), self._correct())
            if monitor.stop or not np.isfinite(losses[step - first_step - 1]):
                break
        validation = self._validate() if step == end and self.run.validation is not None else None
        weights = None
        if self._weight_sums is not None:
            weights = torch.from_numpy(self._weight_sums[first_step - epoch_first : step - epoch_first])
        return Segment(first_step, torch.from_numpy(losses[: step - first_step]), self._correct(), validation, weights)

    def _sums(self, step: int, count: int) -> np.ndarray[Any, Any] | None:
        """The summed weights of the rows of these steps, where rows are weighted."""
        first = step % self.spec.steps_per_epoch
        return None if self._weight_sums is None else self._weight_sums[first : first + count]

    def _tally(self, name: str) -> list[np.int64]:
        """One entry of every partition's tally."""
        column = TALLY.index(name)
        return [tally[column] for tally in self._tallies]

    def _clear_tally(self, *names: str) -> None:
        for tally in self._tallies:
            for name in names:
                tally[TALLY.index(name)] = 0

    def _correct(self) -> int | None:
        return int(sum(self._tally("correct"))) if has_accuracy(self.spec) else None

    def _views(self, name: str, dtype: type) -> list[np.ndarray[Any, Any]]:
        """A buffer of every partition."""
        return [self.arena.view(f"{name}.{number}", dtype) for number in range(self._plan.partitions)]

    def _call_steps(self) -> int:
        if not self._step_seconds:
            return FIRST_STEPS
        seconds = PROBE_SECONDS if self.team.probing else CALL_SECONDS
        return clamp(1, int(seconds / self._step_seconds), MAX_CALL_STEPS)

    def _fill_order(self, epoch: int) -> None:
        rows = self.spec.rows
        self._row_order(
            self.arena.order.ctypes.data, rows, permutation_bits(rows), signed_seed(self.spec.seed), epoch
        )  # fmt: skip
        if self.run.train_rows is not None:
            order = self.arena.order[:rows]
            order[:] = self.run.train_rows.numpy()[order]

    def _train(self, step: int, count: int) -> np.ndarray[Any, Any]:
        """Train `count` steps; returns the mean loss of each: the partitions' sums, added in their order, times the row weight.

        Small networks have thousands of calls per second, so NumPy's views are made once per session.
        """
        spec = self.spec
        scalars = step_scalars(spec, step, count, self.run.outputs, self._sums(step, count))
        for column, name in enumerate(SCALARS):
            self._scalars[:count, column] = scalars[name]
        first_row = step % spec.steps_per_epoch * spec.batch_size
        self.arena.set_words("call.train", count, first_row, step)
        begin = time.perf_counter()
        self._has_results = False
        self._call("train")
        self._has_results = True
        self._step_seconds = (time.perf_counter() - begin) / count
        self.team.note(self._step_seconds)
        return reduce(np.add, [losses[:count] for losses in self._loss_sums]) * scalars["row_weight"]

    def _call(self, kind: str) -> None:
        numbers = range(self._plan.partitions) if self._plan.partitions > 1 else ()
        self.team.call(self._entries[f"{kind}.alone"], [self._entries[f"{kind}.{number}"] for number in numbers])

    def _validate(self) -> Metrics:
        assert self.run.validation is not None
        self._clear_tally("validation_loss", "validation_correct")
        self._call("validate")
        loss_sum = sum(float(entry.view(np.float64)) for entry in self._tally("validation_loss"))
        correct = int(sum(self._tally("validation_correct")))
        return Metrics.of(self.spec, loss_sum, correct, len(self.run.validation[0]), self.run.outputs)

    def close(self) -> None:
        self.team.close()
        if self._has_results:
            self._write_back()
