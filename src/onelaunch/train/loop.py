"""The driver of a run, the same for every engine: history, checkpoints, progress, Ctrl-C, the stop on NaN."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onelaunch.device import device_name
from onelaunch.engines import FASTEST_FIRST, choose, engine_or_reason
from onelaunch.engines.contract import Engine, Run, State
from onelaunch.errors import DivergedError
from onelaunch.run.distributed import world
from onelaunch.train.best_weights import EpochEnd
from onelaunch.train.checkpoint import (
    Checkpoint,
    check_fits,
    checkpoint_lock,
    frozen_parameters,
    load_checkpoint,
    other_buffers,
    restore_buffers,
    save_checkpoint,
    set_aside,
    tensors_of,
)
from onelaunch.train.fingerprints import fingerprint, identity_text, validation_fingerprint
from onelaunch.train.history import History, Recorder
from onelaunch.train.interrupts import on_interrupt
from onelaunch.train.progress import Progress
from onelaunch.train.run_session import RunSession, uneven_updates

log = logging.getLogger("onelaunch")
COST = "A native engine trains an MLP of Linear, norm, activation, dropout and residual layers several times faster"
_said: set[str] = set()


class Listener:
    """Called once when a run has been accepted and is about to start, then after each epoch."""

    needs_weights = False  # whether the model must hold the weights of the epoch that has ended
    may_stop = False  # whether `stop` may become true: an engine then does not train ahead of the epoch that has ended

    @property
    def stop(self) -> bool:
        """Whether the run ends after this epoch."""
        return False

    def started(self, history: History) -> None: ...

    def epoch(self, history: History, record: dict[str, Any]) -> None: ...


class StopSwitch:
    """The Monitor of the engines: passes progress out and the request to stop in."""

    def __init__(self, progress: Progress) -> None:
        self.stop = False
        self._progress = progress

    def report(self, step: int, loss: float, correct: int | None) -> None:
        self._progress.update(step, loss, correct)

    def interrupt(self) -> None:
        """The first Ctrl-C requests a stop at the next step; a second one does not wait for it."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True


def drive(
    run: Run, *, checkpoint: Path | None, resume: bool, progress: Progress, listener: Listener, started: float,
    chosen: tuple[Engine, str] | None = None,
) -> History:  # fmt: skip
    """Train `run` to its end and return its history. `chosen`: an engine and the reason for it, instead of the fastest.

    Ctrl-C ends the run at a step boundary: the checkpoint is written, the model is usable, and KeyboardInterrupt is raised.
    Where several processes train together, all read the checkpoint, and the leading one writes it and reports.
    """
    team = world()
    written = checkpoint if team.leads else None
    if not team.leads:
        progress, listener = Progress(), Listener()
    epoch_end = EpochEnd(run)
    needs_weights = epoch_end.needs_weights or listener.needs_weights
    run = dataclasses.replace(run, checkpoints=checkpoint is not None or needs_weights or listener.may_stop)
    with checkpoint_lock(written, must_exist=resume):
        resumed = None
        if resume and checkpoint:
            resumed = load_checkpoint(checkpoint)
            check_fits(checkpoint, resumed, run)
            run = dataclasses.replace(run, uneven_updates=uneven_updates(run, resumed.state, resumed.step))
        chosen = chosen or _choose(run, resumed)
        history = History(device=device_name(run.device))
        recorder = Recorder(run.spec, run.outputs, history)
        state: State = {}
        if resumed:
            run.model.load_state_dict(resumed.model)
            restore_buffers(run.model, resumed.buffers)
            state = resumed.state
            history.losses, history.epochs = resumed.losses.tolist(), resumed.about["epochs"]
            history.seconds = resumed.about["seconds"]
            recorder.restore(resumed.about["partial"])
            epoch_end.restore(resumed.about.get("best", {}), resumed.best)
        elif written and written.exists():
            set_aside(written)
        data = {}
        if written:
            rows = resumed.about["data"] if resumed else fingerprint(run)
            data = {"data": rows, "validation": validation_fingerprint(run), "loss": identity_text(run.loss_function)}
        save = Saver(run, recorder, epoch_end, written, data)
        session = RunSession(run, state, history, chosen, saves=written is not None)
        try:
            _say_fallback(run, history)
            listener.started(history)
            if written and not resumed:  # so that a run that is killed in its first epoch can be resumed too
                save(session.snapshot(), session.engine)
            if epoch_end.best and epoch_end.stopped:
                log.warning(
                    f"early_stopping={epoch_end.best.rule.patience} ended this run after epoch {len(history.epochs)}: "
                    "pass a larger one, or None, to go on"
                )
            switch = StopSwitch(progress)
            with on_interrupt(switch.interrupt), progress.running(run.spec, history, run.outputs):
                history.startup_seconds = time.perf_counter() - started
                clock = time.perf_counter()
                for segment in () if epoch_end.stopped else session.segments(len(history.losses), switch):
                    clock += session.restart_seconds
                    seconds = time.perf_counter() - clock
                    clock += seconds  # a GPU trains on while a segment is recorded: that time counts for the next one
                    session.restart_seconds = 0.0
                    raise_if_diverged(segment.first_step, segment.losses, checkpoint)
                    record = recorder.add(segment, seconds)
                    session.note()
                    if written or (record is not None and needs_weights):
                        saving = time.perf_counter()
                        state = session.snapshot()
                        if record and epoch_end.needs_weights:
                            epoch_end.complete(record)
                        if written:
                            save(state, session.engine)
                        clock += time.perf_counter() - saving
                    if record:
                        progress.epoch(record)
                        tell = functools.partial(listener.epoch, history, record)
                        if not listener.needs_weights:
                            tell()
                        elif session.call(tell) and written:  # a resumed run must have what the callbacks have changed
                            save(session.snapshot(), session.engine)
                    if team.any(switch.stop, run.device) and len(history.losses) < run.spec.total_steps:
                        raise KeyboardInterrupt
                    if epoch_end.stopped or listener.stop:
                        break
            session.snapshot()
            save.raise_on_bad_weights()
            if team.any(switch.stop, run.device):  # Ctrl-C in the last steps, which are trained and saved all the same
                raise KeyboardInterrupt
        finally:
            session.close()
        epoch_end.finish()
        if epoch_end.best is not None:
            history.best_epoch = epoch_end.best.epoch
        return history


def _say_fallback(run: Run, history: History) -> None:
    """Log one line where no native engine takes the run: what is in the way and what it costs. Each line is logged once."""
    if history.engine != "eager" or run.spec.engine != "auto" or world().size > 1:
        return
    reason = run.no_network_reason or history.reason
    line = f"fit runs the model with PyTorch, one operation after another: {reason}. {COST}"
    if line not in _said:
        _said.add(line)
        log.warning(line)


def _choose(run: Run, resumed: Checkpoint | None) -> tuple[Engine, str]:
    """The engine and the reason for it. A resumed run keeps its engine, for the same bits, if it can and none is requested."""
    if resumed and run.spec.engine == "auto" and world().size == 1:
        name = resumed.about["engine"]
        found = engine_or_reason(name, run.device) if name in FASTEST_FIRST else "not an engine"
        if not isinstance(found, str) and not found.unsupported_reason(run):
            return found, f"{name}, which the resumed run used"
    return choose(run)


class Saver:
    """Writes the checkpoint of a run, unless its weights are no longer finite."""

    def __init__(
        self, run: Run, recorder: Recorder, epoch_end: EpochEnd, path: Path | None, data: dict[str, str],
        finite_before: frozenset[str] | None = None,
    ) -> None:  # fmt: skip
        """`data` says what rows and loss function the run has. `finite_before`: the names of the tensors whose values are
        finite at the start, where they are known; a mask may contain -inf."""
        self.run, self.recorder, self.epoch_end, self.path, self._data = run, recorder, epoch_end, path, data
        if finite_before is None:
            finite_before = frozenset(name for name, tensor in self._floats() if _is_finite(tensor))
        self.finite_before = finite_before

    def _floats(self) -> list[tuple[str, torch.Tensor]]:
        state = self.run.model.state_dict()
        return [(n, t) for n, t in state.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]

    def __call__(self, state: State, engine: str) -> None:
        """`engine`: the one that a resumed run goes on with, or "auto"."""
        assert self.path is not None
        self.raise_on_bad_weights()
        run, history = self.run, self.recorder.history
        about = {
            "spec": run.spec.to_dict(), "model": str(run.model), "frozen": frozen_parameters(run.model),
            **self._data, "engine": engine, "precision": history.precision, "epochs": history.epochs,
            "partial": self.recorder.partial(), "seconds": history.seconds, "best": self.epoch_end.to_dict(),
        }  # fmt: skip
        losses = torch.tensor(history.losses, dtype=torch.float32)
        best, buffers = self.epoch_end.weights, other_buffers(run.model)
        save_checkpoint(self.path, Checkpoint(tensors_of(run.model), state, losses, about, best, buffers))

    def raise_on_bad_weights(self) -> None:
        """Raise DivergedError if the last update has overflowed, which a finite loss does not show.

        Such weights must not replace a good checkpoint.
        """
        step = len(self.recorder.history.losses) - 1
        for name, tensor in self._floats():
            if name in self.finite_before and not _is_finite(tensor):
                raise _diverged(f"{name} is no longer finite after step {step}", step, self.path)


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64):
        with np.errstate(invalid="ignore"):  # inf - inf
            return math.isfinite(tensor.detach().numpy().sum(dtype=np.float64))  # NumPy is faster for small tensors
    return math.isfinite(tensor.sum(dtype=torch.float64).item())


def raise_if_diverged(first_step: int, losses: torch.Tensor, checkpoint: Path | None) -> None:
    finite = np.isfinite(losses.numpy())
    if not finite.all():
        offset = int(finite.argmin())
        step = first_step + offset
        raise _diverged(f"the loss is {losses[offset].item()} at step {step}", step, checkpoint)


def _diverged(what: str, step: int, checkpoint: Path | None) -> DivergedError:
    kept = f"; the last good checkpoint is {str(checkpoint)!r}" if checkpoint else ""
    remedy = "pass a smaller lr" if step else "scale x and y down, or pass a smaller lr"
    return DivergedError(f"{what}: {remedy}{kept}", step)
