"""One thread or many: the same bits, and the choice between them; signals are served."""

from __future__ import annotations

import dataclasses
import queue
import signal
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu import session as session_module
from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.kernel import Command
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import host
from onelaunch.engines.cpu.program.program import Program, program_of
from onelaunch.engines.cpu.session import CpuSession, settings_for
from onelaunch.engines.cpu.threads import MIN_PROBE_INTERVAL, PROBE_CALLS, Team
from tests.engines.cpu.runs import Bystander, Course, assert_same_bits, copy_of, data, make


@pytest.fixture(params=["columns", "rows"])
def run(request: pytest.FixtureRequest) -> Run:
    """Its work is split by the columns of each layer, or by the rows of the batch."""
    torch.manual_seed(0)
    if request.param == "rows":
        model = nn.Sequential(
            nn.Dropout(0.1), nn.Linear(9, 50), nn.LayerNorm(50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 32), nn.Tanh(),
            nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 10),
        )  # fmt: skip
        x, y = data("cross_entropy", 350, 9, 10)
        run = make(model, x, y, (x, y), epochs=4, batch_size=120, momentum=0.9)
        assert Plan(settings_for(run, 3), host()).by_rows
        return run
    model = nn.Sequential(
        nn.Linear(50, 70), nn.BatchNorm1d(70), nn.ReLU(), nn.Dropout(0.2), nn.Linear(70, 64), nn.Tanh(), nn.Linear(64, 10)
    )  # fmt: skip
    x, y = data("cross_entropy", 200, 50, 10)
    return make(model, x, y, (x, y), epochs=4, batch_size=32, momentum=0.9)


def course(run: Run, cache_folder: Path, partitions: int, threads: bool | None) -> Course:
    """The run with the other threads always (True), never (False) or in every other call (None)."""
    own = copy_of(run)
    session = CpuSession(own, {}, cache_folder=cache_folder, partitions=partitions)
    calls = 0

    def note(seconds: float) -> None:
        nonlocal calls
        calls += 1
        session.team.uses_threads = calls % 2 == 0 if threads is None else threads

    session.team.note = note  # type: ignore[method-assign, assignment]
    session.team.uses_threads = bool(threads)
    segments = list(session.segments(0, Bystander()))
    session.snapshot()
    session.close()
    assert segments[-1].validation is not None
    return Course(
        torch.cat([s.losses for s in segments]), own.model, sum(s.correct or 0 for s in segments),
        segments[-1].validation.loss,
    )  # fmt: skip


@pytest.mark.parametrize("partitions", [2, 3])
def test_the_bits_do_not_depend_on_the_threads(run: Run, partitions: int, cache_folder: Path) -> None:
    first = course(run, cache_folder, partitions, threads=True)
    for threads in (True, False, None):
        assert_same_bits(first, course(run, cache_folder, partitions, threads=threads))


def phases_of(commands: list[Command]) -> list[list[Command]]:
    """The commands between barriers, without the barriers."""
    ends = [number for number, command in enumerate(commands) if command.kernel is driver.BARRIER]
    starts = [0, *(number + 1 for number in ends)]
    return [commands[first:last] for first, last in zip(starts, [*ends, len(commands)], strict=True)]


def preempted(program: Program, position: int) -> Program:
    """The program of two partitions in which, in every phase of a step, partition 0 executes `position` commands, then
    partition 1 all of its own, then partition 0 the rest. So it does before the first step."""

    def mixed(own: list[Command], others: list[Command]) -> list[Command]:
        phases = zip(phases_of(own), phases_of(others), strict=True)
        return [c for first, second in phases for c in (*first[:position], *second, *first[position:])]

    before, steps = (mixed(*both) for both in zip(program.lists["train.0"], program.lists["train.1"], strict=True))
    return dataclasses.replace(program, lists={**program.lists, "train.alone": (before, steps)})


def test_no_phase_reads_what_another_partition_writes_in_it(
    run: Run, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a race between threads would change now and then, one thread that switches between them changes every time."""
    first = course(run, cache_folder, 2, threads=False)
    program = program_of(Plan(settings_for(run, 2), host()))
    longest = max(map(len, phases_of(program.lists["train.0"][1])))
    assert longest > 5
    for position in range(longest + 1):
        monkeypatch.setattr(session_module, "program_for", lambda *_, p=position: preempted(program, p))
        assert_same_bits(first, course(run, cache_folder, 2, threads=False))


def pace(team: Team, with_threads: float, alone: float, calls: int) -> list[bool]:
    taken = []
    for _ in range(calls):
        taken.append(team.uses_threads)
        team.note(with_threads if team.uses_threads else alone)
    return taken


def test_the_team_takes_the_faster_way_and_notices_a_change() -> None:
    """A probe itself makes a few calls the slower way, so the test counts most calls, not all."""
    team = Team(2, lambda: None)
    taken = pace(team, with_threads=1.0, alone=1.5, calls=2 * MIN_PROBE_INTERVAL)
    assert sum(taken) >= len(taken) - PROBE_CALLS
    # Another process takes a core: waiting at barriers makes two threads slower than one.
    taken = pace(team, with_threads=4.0, alone=1.6, calls=100)
    assert sum(taken) <= 3 * MIN_PROBE_INTERVAL
    # The machine is free again: the next probe finds out.
    pace(team, with_threads=1.0, alone=1.5, calls=200)
    taken = pace(team, with_threads=1.0, alone=1.5, calls=100)
    assert sum(taken) >= 90


def test_a_single_partition_starts_no_thread() -> None:
    team = Team(1, lambda: None)
    before = threading.active_count()
    team.call(lambda: None, [])
    team.note(1.0)
    assert threading.active_count() == before
    assert not team.uses_threads


def test_close_ends_the_threads(run: Run, cache_folder: Path) -> None:
    before = threading.active_count()
    session = CpuSession(run, {}, cache_folder=cache_folder, partitions=2)
    next(iter(session.segments(0, Bystander())))
    session.close()
    session.close()
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signals_are_served_while_it_runs(cache_folder: Path) -> None:
    """A long segment; a timer's handler must run in the middle of it, not at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 600), nn.ReLU(), nn.Linear(600, 10))
    x, y = data("cross_entropy", 64_000, 200, 10)
    session = CpuSession(make(model, x, y, epochs=1, batch_size=16), {}, cache_folder=cache_folder)
    monitor = Bystander()
    served: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        served.append(number)
        monitor.stop = len(served) >= 2

    before = signal.signal(signal.SIGVTALRM, handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.03, 0.03)
    try:
        segment = next(iter(session.segments(0, monitor)))
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        session.close()
    assert 0 < len(segment.losses) < 4000


def test_a_call_whose_first_partition_never_starts_ends(run: Run, cache_folder: Path) -> None:
    """A second Ctrl-C can arrive after the other threads got their work and before this one began its own."""
    session = CpuSession(run, {}, cache_folder=cache_folder, partitions=2)

    def interrupted() -> None:
        raise KeyboardInterrupt

    session._entries["train.0"] = interrupted
    assert_ends(session)


class InterruptedQueue(queue.SimpleQueue):
    """Ctrl-C arrives as soon as work is handed out."""

    def put(self, item: object, *_: object) -> None:
        super().put(item)
        if item is not None:
            raise KeyboardInterrupt


def test_a_call_interrupted_while_work_is_handed_out_ends(
    run: Run, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = CpuSession(run, {}, cache_folder=cache_folder, partitions=3)
    monkeypatch.setattr(queue, "SimpleQueue", InterruptedQueue)
    assert_ends(session)


def assert_ends(session: CpuSession) -> None:
    session.team.uses_threads = True

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            next(session.segments(0, Bystander()))
        session.close()

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()
    assert all(not thread.name.startswith("onelaunch-") for thread in threading.enumerate())
