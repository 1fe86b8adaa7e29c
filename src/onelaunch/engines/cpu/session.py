"""A run on the CPU engine: the model's weights into the arena, native calls of about 50 ms, and the weights back.

Python has the main thread again after every call, so signals, progress and a wish to stop are served between two steps. All
numbers that PyTorch computes in double precision on the host (learning rate, bias corrections) are computed here for the
coming steps.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onelaunch.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.engines.cpu.arena import Arena
from onelaunch.engines.cpu.cache import OBJECTS
from onelaunch.engines.cpu.native import Native
from onelaunch.engines.cpu.plan.plan import CHUNK_STEPS, SCALARS, Plan
from onelaunch.engines.cpu.plan.settings import EVALUATION_ROWS, Settings, useful_shares
from onelaunch.engines.cpu.plan.target import Target, host
from onelaunch.engines.cpu.threads import PATIENCE, Team, yield_address
from onelaunch.optimizers import constants
from onelaunch.rng import permutation_bits
from onelaunch.run.objective import has_accuracy
from onelaunch.run.step_scalars import row_weights, step_scalars

CALL_SECONDS = 0.05  # of a native call: Python answers signals and progress in between
LOOK_SECONDS = 0.005  # of one that only finds out whether threads help: half of these go the slower way
FIRST_STEPS = 8  # of the first call, before the time of a step is known


def settings_for(run: Run, shares: int | None = None) -> Settings:
    """What the code for a run depends on. The number of shares follows from the network and PyTorch's thread count."""
    spec, network = run.spec, run.network
    assert network is not None
    batch = min(spec.batch_size, spec.rows)
    return Settings(
        network=network,
        batch=batch,
        evaluation=max(EVALUATION_ROWS, batch) if run.validation is not None else EVALUATION_ROWS,
        shares=shares or useful_shares(network, batch, torch.get_num_threads()),
        optimizer=spec.optimizer,
        momentum=spec.momentum > 0,
        nesterov=spec.nesterov,
        weight_decay=spec.weight_decay > 0,
        loss=spec.loss,
        smoothing=spec.label_smoothing > 0,
        bytes_in=run.x.dtype == torch.uint8,
        checks=run.validation is not None,
    )


class CpuSession:
    def __init__(
        self, run: Run, state: Mapping[str, torch.Tensor], *, shares: int | None = None, target: Target | None = None,
        place: Path | None = None, memory: Any = None,
    ) -> None:  # fmt: skip
        """The keyword arguments are for tests: another number of shares, target, cache folder, memory for the arena."""
        self.run, self.spec = run, run.spec
        self.precision = "fp32"
        self._plan = Plan(settings_for(run, shares), target or host())
        self.plan = str(self._plan)
        self.native = Native(self._plan, place or OBJECTS.folder())
        self.arena = Arena(self._plan, self.spec.rows, memory)
        self.allocations = {"arena": 1}
        self.team = Team(self._plan.shares, lambda: self.arena.set_control(abandoned=1))
        self._tensors = dict(run.model.state_dict(keep_vars=True))
        self._order_address = self.arena.order.ctypes.data
        self._done = 0  # steps of the run that the arena holds
        self._between_steps = True  # else a call was broken off, and its weights are half one step's, half the next's
        self._step_seconds = 0.0
        self._functions()
        self._load(state)
        self._point_at_data()

    def _functions(self) -> None:
        pointer = ctypes.c_void_p
        kinds = ("train", "check") if self._plan.settings.checks else ("train",)
        names = [f"share_{share}" for share in range(self._plan.shares)] if self._plan.shares > 1 else []
        self._alone = {kind: self.native.function(f"{kind}_alone", pointer) for kind in kinds}
        self._together = {kind: [self.native.function(f"{kind}_{name}", pointer) for name in names] for kind in kinds}
        self._row_order = self.native.function("row_order", pointer, *[ctypes.c_int64] * 4)

    def _point_at_data(self) -> None:
        spec, run = self.spec, self.run
        self._kept = [run.x.contiguous(), run.y.contiguous()]  # the native code reads these; keep them alive
        self.arena.set_control(
            x=self._kept[0].data_ptr(), y=self._kept[1].data_ptr(), rows=spec.rows, order=self._order_address,
            yield_thread=yield_address(), patience=PATIENCE, abandoned=0, seed=_as_signed(spec.seed),
        )  # fmt: skip
        if run.validation is not None:
            check = [tensor.contiguous() for tensor in run.validation]
            self._kept += check
            self.arena.set_control(check_x=check[0].data_ptr(), check_y=check[1].data_ptr(), check_rows=len(check[0]))
        self.arena.set_hyperparameters(
            **constants(spec), smoothing=spec.label_smoothing,
        )  # fmt: skip

    # Weights and optimizer state.

    def _load(self, state: Mapping[str, torch.Tensor]) -> None:
        plan, arena = self._plan, self.arena
        for name in plan.buffers:  # a share without rows never writes its losses
            if name.startswith(("parameters", "flag.", "tally.", "losses.", "mean.", "variance.", "ticks.")):
                arena.view(name, np.uint8)[:] = 0
        for stage in plan.stages:
            for number in stage.norms:
                arena.view(f"scale.{stage.index}.{number}")[: stage.width] = 1  # for a norm without its own
        for parameter in plan.parameters:
            arena.write(parameter.buffer, self._tensors[parameter.name].detach().numpy())
            for number, kind in enumerate(plan.state_names if parameter.trained else ()):
                saved = state.get(f"{kind}.{parameter.name}")
                if saved is not None:
                    arena.write(parameter.buffer, saved.detach().cpu().float().numpy(), self._shift(number))

    def _shift(self, state: int) -> int:
        return (state + 1) * self._plan.state_stride

    def snapshot(self) -> State:
        self._write_back()
        state: State = {}
        for parameter in self._plan.parameters:
            for number, kind in enumerate(self._plan.state_names if parameter.trained else ()):
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
        """`num_batches_tracked` of every norm that has one."""
        found = {}
        for stage in self._plan.stages:
            for number in stage.norms:
                norm = stage.groups[number].norm
                if norm and norm.tracks:
                    found[stage.index, number] = self._tensors[f"{norm.path}.num_batches_tracked"]
        return found

    # Training.

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        self._done = first_step
        for (stage, number), tensor in self._counters().items():
            # So that `batches + step` is what the norm has seen.
            self.arena.view(f"batches.{stage}.{number}", np.float64)[0] = int(tensor) - first_step
        while self._done < self.spec.total_steps:
            yield self._segment(self._done, monitor)

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        spec = self.spec
        end = spec.epoch_end(first_step)
        self._fill_order(spec.epoch_of(first_step))
        tallies = [self.arena.view(f"tally.{share}", np.int64) for share in range(self._plan.shares)]
        for tally in tallies:
            tally[0] = 0
        counts = has_accuracy(spec)
        losses = np.empty(end - first_step, np.float32)
        step, reported = first_step, time.perf_counter()
        while step < end:
            count = min(self._call_steps(), end - step)
            self._train(step, count)
            losses[step - first_step : step - first_step + count] = self._losses(step, count)
            step += count
            self._done = step
            now = time.perf_counter()
            if now - reported > CALL_SECONDS / 2 or monitor.stop:
                reported = now
                right = int(sum(tally[0] for tally in tallies)) if counts else None
                monitor.report(step, float(losses[step - first_step - 1]), right)
            if monitor.stop or not np.isfinite(losses[step - first_step - 1]):
                break
        validation = self._check() if step == end and self.run.validation is not None else None
        right = int(sum(tally[0] for tally in tallies)) if counts else None
        return Segment(first_step, torch.from_numpy(losses[: step - first_step]), right, validation)

    def _call_steps(self) -> int:
        if not self._step_seconds:
            return FIRST_STEPS
        seconds = LOOK_SECONDS if self.team.looking else CALL_SECONDS
        return max(1, min(CHUNK_STEPS, int(seconds / self._step_seconds)))

    def _fill_order(self, epoch: int) -> None:
        spec = self.spec
        bits = permutation_bits(spec.rows)
        self._row_order(self._order_address, spec.rows, bits, _as_signed(spec.seed), epoch)

    def _train(self, step: int, count: int) -> None:
        spec = self.spec
        scalars = step_scalars(spec, step, count, self.run.outputs)
        self.arena.view("scalars").reshape(-1, len(SCALARS))[:count] = np.stack([scalars[name] for name in SCALARS], 1)
        first_row = step % spec.steps_per_epoch * spec.batch_size
        self.arena.set_control(first_row=first_row, first_step=step, count=count)
        begin = time.perf_counter()
        self._between_steps = False
        self._call("train")
        self._between_steps = True
        self._step_seconds = (time.perf_counter() - begin) / count
        self.team.note(self._step_seconds)

    def _call(self, kind: str) -> None:
        address = self.arena.address
        together = [partial(function, address) for function in self._together[kind]]
        self.team.call(partial(self._alone[kind], address), together)

    def _losses(self, step: int, count: int) -> np.ndarray[Any, Any]:
        """Sums of the shares, in their order, times the weight that makes them a mean."""
        shares = [self.arena.view(f"losses.{share}", np.float64)[:count] for share in range(self._plan.shares)]
        total = np.sum(shares, axis=0)
        return total * row_weights(self.spec, step, count, self.run.outputs)

    def _check(self) -> Metrics:
        tallies = [self.arena.view(f"tally.{share}", np.int64) for share in range(self._plan.shares)]
        for tally in tallies:
            tally[1:] = 0
        self._call("check")
        assert self.run.validation is not None
        rows = len(self.run.validation[0])
        loss_sum = sum(float(tally.view(np.float64)[1]) for tally in tallies)
        correct = sum(int(tally[2]) for tally in tallies)
        return Metrics.of(self.spec, loss_sum, correct, rows, self.run.outputs)

    def close(self) -> None:
        self.team.close()
        if self._between_steps:
            self._write_back()


def _as_signed(seed: int) -> int:
    return seed - 2**64 if seed >= 2**63 else seed
