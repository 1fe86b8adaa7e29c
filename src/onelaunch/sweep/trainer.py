"""Trains members: groups them, chooses an engine per group, and yields each member when it is done.

A group has members of one network, batch size, optimizer, precision and loss. An engine with `train_members` trains a group
together; any other trains one member after another, through the driver of `fit`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from onelaunch.device import device_name
from onelaunch.engines import choose
from onelaunch.engines.contract import Engine, Run, State
from onelaunch.engines.members import MemberResult, MembersEngine, MembersMonitor, MemberTask
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.errors import DivergedError, OnelaunchError, UnsupportedError, first_line, is_out_of_memory
from onelaunch.run.distributed import LostRankError
from onelaunch.run.network import Dropout, Network
from onelaunch.sweep.active import ActiveMember, Job, MemberError, Outcome, Switch, callback_failure
from onelaunch.sweep.member import SHARED
from onelaunch.train.callbacks import Callback, WithCallbacks
from onelaunch.train.history import History
from onelaunch.train.inputs import network_of, read_again
from onelaunch.train.loop import Listener, drive
from onelaunch.train.progress import Progress

log = logging.getLogger("onelaunch")
CPU_CHUNK = 256  # members whose models exist at once
GPU_CHUNK = 4096  # of one launch: enough to fill every multiprocessor several times


def group_of(run: Run) -> tuple[Any, ...]:
    """Equal for members that an engine may train together."""
    spec = run.spec
    return (
        _shape_of(run.network), run.no_network_reason, min(spec.batch_size, spec.rows), spec.optimizer, spec.nesterov,
        spec.schedule, spec.precision, spec.loss, spec.engine, spec.memory, run.x.dtype, run.x.shape[1:], run.device,
        run.outputs, run.validation is None, run.weights is None, spec.clip_norm is None,
    )  # fmt: skip


@functools.cache
def _shape_of(network: Network | None) -> Network | None:
    """The network without the probabilities of its dropout, which may differ between members."""
    if network is None:
        return None
    layers = tuple(dataclasses.replace(each, p=0.0) if isinstance(each, Dropout) else each for each in network.layers)
    return dataclasses.replace(network, layers=layers)


def train(jobs: Iterable[Job], switch: Switch, callbacks: tuple[Callback, ...] = ()) -> Iterator[Outcome]:
    """Train every job and yield its outcome when it is done, in any order. Ends early when the switch says stop."""
    source = iter(jobs)
    at_once = 0  # members whose models exist at once; 0 until the first run says where it trains
    while not switch.stop:
        chunk: dict[int, tuple[Job, Run]] = {}
        for job in source:
            if switch.stop:  # making a model may be slow
                return
            try:
                run = job.make() if job.continues is None or job.continues.run is None else job.continues.run
            except MemberError as error:
                if chunk and error.__cause__ is not None and is_out_of_memory(error.__cause__):
                    at_once, source = len(chunk), itertools.chain([job], source)
                    break
                yield Outcome(job.index, None, History(), str(error))
                continue
            chunk[job.index] = (job, run)
            at_once = at_once or (GPU_CHUNK if run.device.type == "cuda" else CPU_CHUNK)
            if len(chunk) >= at_once:
                break
        if not chunk:
            return
        while chunk and not switch.stop:
            try:
                for outcome in _train_chunk(chunk, switch, callbacks):
                    del chunk[outcome.index]
                    yield outcome
                break
            except Exception as error:
                if not is_out_of_memory(error) or len(chunk) < 2:
                    raise
                at_once = max(1, len(chunk) // 2)
                log.warning("out of device memory: %d members at once (%s)", at_once, first_line(error))
                left = list(chunk.values())
                chunk = {}  # frees the models
                source = itertools.chain([job for job, _ in left], source)


def _train_chunk(
    chunk: dict[int, tuple[Job, Run]], switch: Switch, callbacks: tuple[Callback, ...]
) -> Iterator[Outcome]:
    groups: dict[Any, list[tuple[Job, Run]]] = {}
    for job, run in chunk.values():
        groups.setdefault(group_of(run), []).append((job, run))
    for members in groups.values():
        if switch.stop:
            return
        yield from _train_group(members, switch, callbacks)


def _train_group(
    members: Sequence[tuple[Job, Run]], switch: Switch, callbacks: tuple[Callback, ...]
) -> Iterator[Outcome]:
    left = {job.index: (job, run) for job, run in members}
    refused: dict[str, str] = {}  # engines that refused the group only when they started, and their reasons
    together = True
    while left and not switch.stop:
        try:
            engine, reason = choose(members[0][1], refused)
        except UnsupportedError as refusal:
            yield from (Outcome(index, None, History(), str(refusal)) for index in left)
            return
        many = _together_or_none(engine, [run for _, run in left.values()]) if together else None
        try:
            for outcome in _train_with(engine, many, reason, list(left.values()), switch, callbacks):
                del left[outcome.index]
                yield outcome
            return
        except (UnsupportedError, UnsupportedNetworkError) as refusal:
            if many is not None:  # it may still train one member after another
                together = False
            elif members[0][1].spec.engine != "auto" or engine.name in refused:
                yield from (Outcome(index, None, History(), str(refusal)) for index in left)
                return
            else:
                refused[engine.name] = str(refusal)


def _together_or_none(engine: Any, runs: Sequence[Run]) -> MembersEngine | None:
    """The engine, if it can train these runs together."""
    if not hasattr(engine, "train_members"):
        return None
    many = cast(MembersEngine, engine)
    return None if many.members_unsupported_reason(runs) else many


def _train_with(
    engine: Engine, many: MembersEngine | None, reason: str, members: Sequence[tuple[Job, Run]], switch: Switch,
    callbacks: tuple[Callback, ...],
) -> Iterator[Outcome]:  # fmt: skip
    """`many`: the engine, if it trains members together."""
    run = members[0][1]
    if callbacks or run.loader is not None:
        many = None
    parts = any(job.part < 1 or job.continues is not None for job, _ in members)
    if many is None and not parts:
        switch.plans[_group_name(run)] = f"{engine.name}: one member after another"
        yield from _one_after_another(members, switch, callbacks)
        return
    trainer = many or OneByOne(engine)
    switch.plans[_group_name(run)] = f"{engine.name}: {trainer.members_plan([run for _, run in members])}"
    device, on_cpu = device_name(run.device), run.device.type == "cpu"
    active: list[ActiveMember] = []
    for job, own in members:
        found = job.continues.active if job.continues else None
        known = active[0].saver.finite_before if active else None
        found = found or ActiveMember(job.index, own, engine.name, reason, device, known, callbacks)
        found.history.precision = "fp32" if on_cpu and own.spec.precision == "auto" else own.spec.compiled_precision
        found.aim(job.part)
        active.append(found)
    yield from _together(trainer, active, switch)


def _group_name(run: Run) -> str:
    network = str(run.network) if run.network is not None else type(run.model).__name__
    return f"{network}, batch {run.spec.batch_size}, {run.spec.optimizer}"


def _together(engine: MembersEngine, active: list[ActiveMember], switch: Switch) -> Iterator[Outcome]:
    """Train members with one call per round; a member leaves when it is done. Most need one round, up to their target."""
    by_index = {member.index: member for member in active}
    clock = time.perf_counter()
    while by_index and not switch.stop:
        # A member's callback may change the model of the next one, whose task must be made afterwards.
        alone = any(member.acts for member in by_index.values())
        for members in [[each] for each in by_index.values()] if alone else [list(by_index.values())]:
            for member in members:
                member.follow_callbacks()
            returned = 0
            for result in engine.train_members([member.task() for member in members if not member.done], switch):
                now = time.perf_counter()
                member = by_index[result.index]
                member.add(result, now - clock)  # its share of the sweep's time
                clock = now
                returned += 1
                if member.done:
                    yield by_index.pop(result.index).outcome()
            for member in members:
                if member.done and member.index in by_index:  # it cannot be trained as a callback has left it
                    returned += 1
                    yield by_index.pop(member.index).outcome()
            assert returned or switch.stop, "an engine must return the results of its tasks"
            if switch.stop:
                return


class OneByOne(MembersEngine):
    """Any engine as one that trains members: one after another, each in a session of its own.

    A member whose model a callback has changed may need another engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def members_plan(self, runs: Sequence[Run]) -> str:
        return "one member after another"

    def train_members(self, tasks: Sequence[MemberTask], monitor: MembersMonitor) -> Iterator[MemberResult]:
        for task in tasks:
            if monitor.stop:
                return
            engine = choose(task.run)[0] if self.engine.unsupported_reason(task.run) else self.engine
            session = engine.start(dataclasses.replace(task.run, checkpoints=True), cast(State, task.state))
            found, state, error = [], {}, ""
            try:
                for segment in session.segments(task.first_step, _Quiet(monitor)):
                    found.append(segment)
                    if segment.first_step + len(segment.losses) >= task.last_step or monitor.stop:
                        break
                state = session.snapshot()
            except (UnsupportedError, LostRankError):
                raise
            except OnelaunchError as reason:
                error = str(reason)
            finally:
                session.close()
            if error or not monitor.stop:
                yield MemberResult(task.index, tuple(found), state, error)


class _Quiet:
    """The Monitor of one session, which has nothing to show."""

    def __init__(self, monitor: MembersMonitor) -> None:
        self._monitor = monitor

    @property
    def stop(self) -> bool:
        return self._monitor.stop

    def report(self, step: int, loss: float, correct: int | None) -> None: ...


def _one_after_another(
    members: Sequence[tuple[Job, Run]], switch: Switch, callbacks: tuple[Callback, ...]
) -> Iterator[Outcome]:
    for job, run in members:
        if switch.stop:
            return
        error = ""
        history = History()
        listener = _Kept(callbacks)
        try:
            if listener.needs_weights:
                run = _as_callbacks_left_it(run)
        except OnelaunchError as reason:
            yield Outcome(job.index, None, History(), str(reason))
            continue
        try:
            history = drive(
                run, checkpoint=None, resume=False, progress=Progress(), listener=listener, started=time.perf_counter()
            )
        except KeyboardInterrupt:
            switch.stop = True
            return
        except Exception as reason:
            if isinstance(reason, DivergedError) and reason is not listener.raised:
                error, history = str(reason), listener.history
            else:
                # A refusal after the first steps is of a model that a callback has changed: it concerns no other member.
                refused_later = isinstance(reason, UnsupportedError) and listener.history.losses
                failure = str(reason) if refused_later else _failure_or_raise(reason, listener.raised)
                yield Outcome(job.index, None, History(), failure)
                continue
        yield Outcome(job.index, run, history, error)


def _as_callbacks_left_it(run: Run) -> Run:
    """The run, with its model read again where a callback of another member has changed it. Raises OnelaunchError if the
    changed model cannot be trained."""
    if network_of(run) == (run.network, run.no_network_reason):
        return run
    run = read_again(run)
    choose(run)
    return run


def _failure_or_raise(error: Exception, raised_by_callback: Exception | None) -> str:
    """Why a member failed; raises what concerns the others as well."""
    if error is raised_by_callback:
        return callback_failure(error)
    if isinstance(error, UnsupportedError | LostRankError) or not isinstance(error, OnelaunchError):
        raise error
    return str(error)


class _Kept(WithCallbacks):
    """Keeps the History, which `drive` does not return if the run diverges, and what a callback has raised."""

    def __init__(self, callbacks: tuple[Callback, ...]) -> None:
        super().__init__(Listener(), callbacks)
        self.history = History()
        self.raised: Exception | None = None

    def started(self, history: History) -> None:
        self.history = history

    def epoch(self, history: History, record: dict[str, Any]) -> None:
        try:
            super().epoch(history, record)
        except Exception as error:
            self.raised = error
            raise


def shared_fields(history: History, known: dict[tuple[str, ...], dict[str, Any]]) -> dict[str, Any]:
    """The fields of a History that many members have in common, as one dict for all that have the same."""
    values = tuple(getattr(history, name) for name in SHARED)
    return known.setdefault(values, dict(zip(SHARED, values, strict=True)))
