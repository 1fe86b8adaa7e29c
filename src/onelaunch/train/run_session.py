"""The session of a run, and the next one where callbacks have changed the model in a way that the session does not follow.

A new session begins as a resumed run does: from the model, the optimizer's state and the step. That is exact to the bit, so
only the change itself changes the run. The optimizer's state of a parameter that does not train at the moment is kept for
when it does again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from onelaunch.engines import choose
from onelaunch.engines.contract import Engine, Monitor, Run, Segment, Session, State
from onelaunch.errors import OnelaunchError, UnsupportedError
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.distributed import world
from onelaunch.train.history import History
from onelaunch.train.inputs import read_again
from onelaunch.train.model_changes import ModelBefore, tensors_of

log = logging.getLogger("onelaunch")
STEP = "engine.step"  # of a parameter's optimizer, as torch.optim counts it


class RunSession:
    """The session of a run. It notes engine, reason, plan and precision in the History."""

    def __init__(self, run: Run, state: State, history: History, chosen: tuple[Engine, str], *, saves: bool) -> None:
        """`saves`: there is a checkpoint, which must have what callbacks change, also where the session follows them."""
        self.run, self.history, self._saves = run, history, saves
        self.restart_seconds = 0.0  # spent on new sessions, since somebody has set this to zero
        self._state = state
        self._change = ""
        self._session: Session | None = None
        self._start(*chosen)

    def _start(self, engine: Engine, reason: str) -> None:
        """Start a session on `engine`, or on the next one if it refuses."""
        try:
            session = engine.start(self.run, self._state)
        except UnsupportedError as refusal:
            if self.run.spec.engine != "auto":
                raise
            engine, reason = choose(self.run, {engine.name: str(refusal)})
            session = engine.start(self.run, self._state)
        self._session, self._idle = session, idle_state(self.run, self._state)
        self.history.engine, self.history.reason = engine.name, reason
        self.note()

    def note(self) -> None:
        """Write what the session says about itself into the History."""
        if self._session is not None:
            self.history.plan, self.history.precision = self._session.plan, self._session.precision
            self.history.allocations = dict(self._session.allocations)

    @property
    def engine(self) -> str:
        """The engine at work; "auto" where a callback's change leaves it to be chosen."""
        return "auto" if self._session is None else self.history.engine

    def segments(self, step: int, monitor: Monitor) -> Iterator[Segment]:
        while step < self.run.spec.total_steps:
            session = self._session or self._renewed(step)
            for segment in session.segments(step, monitor):
                step = segment.first_step + len(segment.losses)
                yield segment
                if self._session is not session:
                    break

    def snapshot(self) -> State:
        """As of a Session, with the optimizer's state of parameters that do not train at the moment."""
        if self._session is not None:
            self._state = {**self._idle, **self._session.snapshot()}
        return self._state

    def call(self, callbacks: Callable[[], None]) -> bool:
        """Call what may change the model, after `snapshot`; returns whether it has, as far as the run has to know.

        The change counts from the next step on. Raises UnsupportedError where several processes train.
        """
        assert self._session is not None
        follows = self._session.follows_model
        before = ModelBefore(self.run, values=not follows or self._saves or world().size > 1)
        try:
            callbacks()
        except BaseException:  # the model keeps what the callbacks have done so far
            self._take_over(before)
            raise
        changed = self._take_over(before)
        if changed and world().size > 1:
            raise UnsupportedError(
                f"a callback changed {self._change} in one of {world().size} processes that train together: change the model "
                "before fit, or train in one process"
            )
        return changed

    def _take_over(self, before: ModelBefore) -> bool:
        session, step = self._session, len(self.history.losses)
        assert session is not None
        if session.follows_model:
            self._change = before.described_difference()
            if not before.has_new_parts():
                return bool(self._change)
            session.close()
        else:
            before.restore_modes()
            self._change = before.difference()
            if not self._change:
                return False
            before.close(session.close)
        self._session, self._state = None, state_after(self._state, before, step)
        return True

    def _renewed(self, step: int) -> Session:
        """The session that trains the changed model. Raises OnelaunchError if no engine can, or not the requested one."""
        begin, before = time.perf_counter(), self.history.engine
        epoch = len(self.history.epochs)
        try:
            self.run, engine, reason = chosen_after(self.run, self._state, step)
            self._start(engine, self.history.reason if engine.name == before else reason)
        except OnelaunchError as error:
            kind = UnsupportedError if isinstance(error, UnsupportedError) else OnelaunchError
            raise kind(f"after epoch {epoch} a callback changed {self._change}: {error}") from error
        if self.history.engine != before:
            self.history.reason += f"; {before} until a callback changed {self._change} after epoch {epoch}"
            log.warning("after epoch %d a callback changed %s: the run goes on with %s", epoch, self._change, reason)
        self.restart_seconds += time.perf_counter() - begin
        assert self._session is not None
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def chosen_after(run: Run, state: Mapping[str, torch.Tensor], step: int) -> tuple[Run, Engine, str]:
    """The run of a model that has changed before `step`, the engine for it, and the reason for the engine.

    Raises OnelaunchError if the model does not fit the run any more, or the requested engine cannot train it.
    """
    run = read_again(run)
    run = dataclasses.replace(run, uneven_updates=uneven_updates(run, state, step))
    return run, *choose(run)


def uneven_updates(run: Run, state: Mapping[str, torch.Tensor], step: int) -> str:
    """Why the optimizer's state needs a count of updates per parameter; empty where all have had as many as the run has steps.

    Only a bias correction reads the count: without it, a parameter that was frozen goes on like the others.
    """
    optimizer = OPTIMIZERS[run.spec.optimizer]
    if not optimizer.bias_correction or step == 0:
        return ""
    kinds = optimizer.state_names(run.spec.momentum)
    for name, parameter in run.model.named_parameters():
        if parameter.requires_grad:
            begun = any(f"{kind}.{name}" in state for kind in kinds)
            count = int(state[f"{STEP}.{name}"]) if f"{STEP}.{name}" in state else step if begun else 0
            if count != step:
                had = f"{name} has had {count} of the run's {step} updates"
                return f"{had}, and this engine counts them for all together"
    return ""


def _keys(run: Run, name: str) -> list[str]:
    """The names of the optimizer's state of a parameter."""
    return [f"{kind}.{name}" for kind in (*OPTIMIZERS[run.spec.optimizer].state_names(run.spec.momentum), STEP)]


def idle_state(run: Run, state: Mapping[str, Any]) -> State:
    """The optimizer's state of the parameters that do not train."""
    frozen = [name for name, parameter in run.model.named_parameters() if not parameter.requires_grad]
    return {key: state[key] for name in frozen for key in _keys(run, name) if key in state}


def state_after(state: Mapping[str, torch.Tensor], before: ModelBefore, step: int) -> State:
    """The optimizer's state after a change of the model at `step`: a tensor that was replaced begins without any."""
    run, found, now = before.run, dict(state), tensors_of(before.model)
    counts = OPTIMIZERS[run.spec.optimizer].counts_steps
    for name, held in before.tensors.items():
        keys, tensor = _keys(run, name), now.get(name)
        if tensor is not held.tensor or tensor.shape != held.memory.shape:
            for key in keys:
                found.pop(key, None)
        elif counts and held.trains and not tensor.requires_grad and any(key in found for key in keys):
            found.setdefault(f"{STEP}.{name}", torch.tensor(float(step)))  # it stays there while the run goes on
    return found
