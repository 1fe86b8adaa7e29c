"""A member in training: what there is to do, how far it is, and what it came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from onelaunch.engines.contract import Run, State
from onelaunch.engines.members import MemberResult, MemberTask
from onelaunch.errors import DivergedError, OnelaunchError, type_and_message
from onelaunch.sweep.member import steps_of_part
from onelaunch.train.best_weights import EpochEnd
from onelaunch.train.callbacks import Callback, act_on_model
from onelaunch.train.history import History, Recorder
from onelaunch.train.inputs import network_of
from onelaunch.train.loop import Saver, raise_if_diverged
from onelaunch.train.model_changes import ModelBefore
from onelaunch.train.run_session import chosen_after, idle_state, state_after


class MemberError(OnelaunchError):
    """A member that cannot be trained, while others may: its model cannot be made, or does not fit the data."""


class SplitError(MemberError):
    """A member that cannot be trained on its rows, while the candidate may be on those of other splits."""


def callback_failure(error: Exception) -> str:
    """Why a member failed whose callback raised `error`."""
    if isinstance(error, OnelaunchError):
        return f"a callback failed: {error}"
    return f"a callback raised {type_and_message(error)}"


@dataclass(frozen=True)
class Job:
    """A member to train from its first step, or from where a rung of successive halving has left it."""

    index: int
    make: Callable[[], Run]  # called shortly before the member trains; raises MemberError if that is not possible
    part: float = 1.0  # of its epochs to train
    continues: Outcome | None = None  # what an earlier part came to


@dataclass
class Outcome:
    """A member that has been trained as far as its job says. The run's model holds its weights."""

    index: int
    run: Run | None  # None: the member cannot be trained, for the reason in `error`
    history: History
    error: str = ""
    finished: bool = True  # False: trained to a rung, and can go on
    active: ActiveMember | None = None  # what is needed to go on


@dataclass
class Switch:
    """The request to stop, and what the trainer tells about itself. Also the MembersMonitor of the engines."""

    stop: bool = False
    plans: dict[str, str] = field(default_factory=dict)  # by group, for people
    steps: int = 0
    stop_file: Path | None = None  # made by a stop: so other processes hear of it

    def report(self, steps: int) -> None:
        self.steps = steps

    def interrupt(self) -> None:
        """The first Ctrl-C requests a stop, a second one does not wait for it."""
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        if self.stop_file is not None:
            self.stop_file.touch()


class ActiveMember:
    """A member in training: its history, and what follows each epoch."""

    def __init__(
        self, index: int, run: Run, engine: str, reason: str, device: str,
        finite_before: frozenset[str] | None = None, callbacks: tuple[Callback, ...] = (),
    ) -> None:  # fmt: skip
        """`finite_before`: as in Saver; it is the same for all members of a group."""
        self.index, self.callbacks = index, callbacks
        self.epoch_end = EpochEnd(run)
        self.acts = act_on_model(callbacks)
        self.needs_weights = self.epoch_end.needs_weights or self.acts  # of each epoch's end, in the model
        self.run = dataclasses.replace(run, checkpoints=True) if self.needs_weights else run
        self.history = History(engine=engine, reason=reason, device=device)
        self.recorder = Recorder(run.spec, run.outputs, self.history)
        self.saver = Saver(run, self.recorder, self.epoch_end, None, {}, finite_before)
        self.state: State = {}
        self.target = run.spec.total_steps
        self.error = ""
        self.run_failed = False  # the model cannot be trained, for the reason in `error`
        self._before: ModelBefore | None = None  # the model as the run knows it, where a callback may change it
        if self.acts and network_of(run) != (run.network, run.no_network_reason):
            self._choose_again("the model of another member")
        self._look()

    @property
    def step(self) -> int:
        return len(self.history.losses)

    def aim(self, part: float) -> None:
        """Train this part of the epochs, rounded to whole epochs, at least one."""
        self.target = steps_of_part(part, self.run.spec.total_steps, self.run.spec.steps_per_epoch)

    @property
    def done(self) -> bool:
        return bool(self.error) or self.epoch_end.stopped or self.step >= self.target

    def task(self) -> MemberTask:
        """The next steps: up to the target, or one epoch where something has to follow each epoch."""
        last = min(self.target, self.run.spec.epoch_end(self.step)) if self.needs_weights else self.target
        return MemberTask(self.index, self.run, self.step, last, self.state)

    def add(self, result: MemberResult, seconds: float) -> None:
        self.state = {**idle_state(self.run, self.state), **result.state} if self.acts else result.state
        if result.error:
            self.error, self.run_failed = result.error, True
            return
        try:
            for segment in result.segments:
                raise_if_diverged(segment.first_step, segment.losses, None)
                record = self.recorder.add(segment, seconds / len(result.segments))
                if record is not None and self.epoch_end.needs_weights:
                    self.epoch_end.complete(record)
                if record is not None and not self._call_back():
                    return
            self.saver.raise_on_bad_weights()
        except DivergedError as error:
            self.error = str(error)

    def _call_back(self) -> bool:
        """Call the callbacks with the History. False if one raises, or leaves a model that cannot be trained: then the
        member has failed."""
        self._look()
        try:
            for callback in self.callbacks:
                callback(self.history)
        except Exception as error:
            self.error, self.run_failed = callback_failure(error), True
            return False
        self.follow_callbacks()
        return not self.run_failed

    def _look(self) -> None:
        self._before = ModelBefore(self.run, values=False) if self.acts and not self.run_failed else None

    def follow_callbacks(self) -> None:
        """Let the next steps train the model as callbacks have left it, those of other members too.

        No session is open, so the model's values count anyway.
        """
        before = self._before
        if before is None:
            return
        before.restore_modes()
        change = before.difference()
        if not change:
            return
        self.state = state_after(self.state, before, self.step)
        self._choose_again(change)
        self._look()

    def _choose_again(self, change: str) -> None:
        try:
            self.run, engine, reason = chosen_after(self.run, self.state, self.step)
        except OnelaunchError as error:
            self.error, self.run_failed = f"a callback changed {change}: {error}", True
            return
        if engine.name != self.history.engine:
            self.history.engine, self.history.reason = engine.name, f"{reason}; a callback changed {change}"

    def outcome(self) -> Outcome:
        if self.run_failed:
            return Outcome(self.index, None, History(), self.error)
        whole = bool(self.error) or self.epoch_end.stopped or self.step >= self.run.spec.total_steps
        if whole:
            self.epoch_end.finish()
            if self.epoch_end.best is not None:
                self.history.best_epoch = self.epoch_end.best.epoch
        return Outcome(self.index, self.run, self.history, self.error, whole, None if whole else self)
