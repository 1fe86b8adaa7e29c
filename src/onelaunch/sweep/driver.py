"""The driver of a sweep: which members to train next, their records and weights, progress, Ctrl-C and the checkpoint."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from onelaunch.errors import OnelaunchError
from onelaunch.run.generators import random_state_kept
from onelaunch.run.metric_names import is_loss
from onelaunch.sweep.active import Job, MemberError, Outcome, Switch
from onelaunch.sweep.halving import parts_of, survivors
from onelaunch.sweep.kept_weights import KeptWeights, State, weights_of
from onelaunch.sweep.member import Member, Record
from onelaunch.sweep.pickled import MakeTrained
from onelaunch.sweep.progress import SweepProgress
from onelaunch.sweep.result import Sweep
from onelaunch.sweep.runs import MemberRuns
from onelaunch.sweep.spread import LostWorkerError, as_they_come, is_here, watched
from onelaunch.sweep.store import Store
from onelaunch.sweep.table import Table
from onelaunch.sweep.trainer import shared_fields, train
from onelaunch.train.callbacks import Callback
from onelaunch.train.interrupts import on_interrupt

MAX_STORED_BYTES = 2**31  # of all members' weights: where they would be more, the checkpoint has none
MAX_EPOCHS = 3**20
MAX_PAUSED_BYTES = 2**30  # of weights and optimizer states that wait for the next rung of successive halving


class Driver:
    def __init__(
        self, members: Sequence[Member], runs: MemberRuns, metric: str, store: Store, progress: SweepProgress,
        callbacks: tuple[Callback, ...] = (), n_jobs: int | None = None,
    ) -> None:  # fmt: skip
        self.members, self.runs, self.metric, self.store, self.progress = members, runs, metric, store, progress
        self.callbacks, self.n_jobs = callbacks, n_jobs
        self.shared: dict[tuple[str, ...], dict[str, Any]] = {}
        self.records: dict[int, Record] = {}
        self.weights = KeptWeights(metric)
        self.switch = Switch()
        self._paused: dict[int, Outcome] = {}  # members that wait for the next rung
        self._done = 0  # members that are finished
        self._table = Table((), metric, runs.validates, 0, 0)  # to format values
        self._best: tuple[float, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For a result that is pickled: without the stream or terminal of its progress."""
        return {**vars(self), "progress": SweepProgress()}

    def run(self, *, halving: bool) -> Sweep:
        """Train the members that have no record yet. After Ctrl-C the result has those that are finished, also if it came
        while the checkpoint was read."""
        begin = time.perf_counter()
        with random_state_kept(), on_interrupt(self.switch.interrupt):
            self.records.update(self.store.load(self.shared))
            self._done = sum(record.finished for record in self.records.values())
            with self.progress.running(len(self.members), self._done):
                if halving:
                    self._halve()
                else:
                    self._train([member for member in self.members if member.index not in self.records], 1.0)
        self._paused = {}
        if self.switch.stop and not self.records:
            raise KeyboardInterrupt
        if len(self.records) == len(self.members) and not any(record.total for record in self.records.values()):
            first = self.members[0]
            raise OnelaunchError(
                f"no candidate can be trained; the first, {first}, failed: {self.records[first.index].error}"
            )
        plan = "\n".join(f"{group}: {text}" for group, text in self.switch.plans.items())
        return Sweep(
            self.members, self.records, self.metric, self.runs.validates, plan, time.perf_counter() - begin,
            self.switch.stop, MakeTrained(self.trained),
        )  # fmt: skip

    def _halve(self) -> None:
        alive = list(dict.fromkeys(member.candidate for member in self.members))
        lengths = [self.runs.options_of(member).get("epochs") for member in self.members]
        epochs = max((length for length in lengths if length), default=MAX_EPOCHS)  # of runs that count steps: unknown
        for part in parts_of(len(alive), epochs):
            chosen = set(alive)
            waiting = [
                member for member in self.members
                if member.candidate in chosen
                and not (member.index in self.records and self.records[member.index].reaches(part))
            ]  # fmt: skip
            self._train(waiting, part)
            if self.switch.stop:
                return
            if part < 1:
                alive = survivors(alive, self.members, self.records, self.metric, part)
                for member in self.members:
                    if member.candidate not in alive:
                        self._paused.pop(member.index, None)
        self.progress.update(len(self.members), self._best[1] if self._best else "")

    def _train(self, members: Sequence[Member], part: float) -> None:
        if self.switch.stop or not members:
            return
        if not is_here(self.n_jobs):
            self._train_elsewhere(members, part)
            return
        for outcome in train(self._jobs(members, part), self.switch, self.callbacks):
            self._add(outcome)

    def _jobs(self, members: Iterable[Member], part: float) -> Iterator[Job]:
        for member in members:
            yield Job(member.index, self._maker(member), part, self._paused.pop(member.index, None))

    def _maker(self, member: Member) -> Callable[[], Any]:
        return lambda: self.runs.run(member)

    def _train_elsewhere(self, members: Sequence[Member], part: float) -> None:
        """Through joblib; each chunk is kept and stored when it is done. Paused members start again there.

        After a stop, workers that see this machine's files return the members that they have finished.
        """
        with contextlib.suppress(MemberError):
            self.runs.model(members[0])  # raises if it shares tensors with the trial's: workers would not all notice
        with tempfile.TemporaryDirectory(prefix="onelaunch-") as folder:
            self.switch.stop_file = Path(folder) / "stop"
            try:
                task = Elsewhere(self.runs, part, self.callbacks, self.switch.stop_file)
                for _, found in as_they_come(train_elsewhere, task, members, self.n_jobs, self.switch):
                    for record, weights in found:
                        self.shared.setdefault(tuple(record.shared.values()), record.shared)
                        self._keep(record, weights)
            except LostWorkerError as error:
                if self.store.folder is None:
                    raise
                kept = f"the same call continues with checkpoint={str(self.store.folder)!r}"
                raise LostWorkerError(f"{error}; {kept}") from error
            finally:
                self.switch.stop_file = None
        self.switch.plans["joblib"] = f"chunks of members, {self.n_jobs} jobs at a time"

    def _add(self, outcome: Outcome) -> None:
        self.runs.shared_tensors.check_unchanged()
        shared = shared_fields(outcome.history, self.shared)
        weights = weights_of(outcome.run.model) if outcome.run else {}
        self._keep(record_of(outcome, shared), weights)
        if not outcome.finished:
            self._pause(outcome, 3 * _bytes(weights))

    def _keep(self, record: Record, weights: State) -> None:
        self.records[record.index] = record
        value = record.value(self.metric)
        if record.total:  # else it could not begin: the next start tries again
            self.weights.add(record.index, value, weights)
            stored = _bytes(weights) * len(self.members) <= MAX_STORED_BYTES and not record.error
            self.store.add(record, weights if stored else {})
        self._note_best(value)
        self._done += record.finished
        self.progress.update(self._done, self._best[1] if self._best else "")

    def _pause(self, outcome: Outcome, size: int) -> None:
        """Keep what is needed to go on. Without room, the member starts again from its first step, to the same bits."""
        if (len(self._paused) + 1) * size <= MAX_PAUSED_BYTES:
            self._paused[outcome.index] = outcome

    def _note_best(self, value: float) -> None:
        if value != value:
            return
        signed = value if is_loss(self.metric) else -value
        if self._best is None or signed < self._best[0]:
            self._best = signed, f"{self._table.heading} {self._table.format_value(value)}"

    def trained(self, member: Member) -> nn.Module:
        """The member's network with its trained weights: kept in memory, in the checkpoint, or trained again."""
        found = self.weights.get(member.index) or self.store.weights(member.index)
        with random_state_kept():
            run = self.runs.run(member)
            if found is not None:
                run.model.load_state_dict(found)
                return run.model
            record = self.records[member.index]
            part = 1.0 if record.finished else record.steps / record.total
            for outcome in train([Job(member.index, lambda: run, part)], Switch(), self.callbacks):
                if outcome.run is not None:
                    return outcome.run.model
                raise OnelaunchError(f"member {member.index} ({member}) failed: {outcome.error}")
        raise KeyboardInterrupt


@dataclass(frozen=True)
class Elsewhere:
    """What the members of a chunk have in common; it travels to other processes."""

    runs: MemberRuns
    part: float
    callbacks: tuple[Callback, ...]
    stop_file: Path


def train_elsewhere(task: Elsewhere, members: Sequence[Member]) -> list[tuple[Record, State]]:
    """Train a chunk of members, in a process of joblib. After a stop, the list has those that are finished."""
    shared: dict[tuple[str, ...], dict[str, Any]] = {}

    def jobs() -> Iterator[Job]:
        for member in members:
            yield Job(member.index, lambda member=member: task.runs.run(member), task.part)  # type: ignore[misc]

    with random_state_kept(), watched(task.stop_file) as switch:
        found = {
            outcome.index: (
                record_of(outcome, shared_fields(outcome.history, shared)),
                weights_of(outcome.run.model) if outcome.run else {},
            )
            for outcome in train(jobs(), switch, task.callbacks)
        }
        task.runs.shared_tensors.check_unchanged()
    return [found[member.index] for member in members if member.index in found]


def record_of(outcome: Outcome, shared: dict[str, Any]) -> Record:
    spec = outcome.run.spec if outcome.run else None
    return Record.of(outcome.index, outcome.history, shared, spec, error=outcome.error, finished=outcome.finished)


def _bytes(weights: State) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
