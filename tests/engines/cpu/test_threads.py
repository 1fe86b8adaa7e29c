"""One thread or many: the same bits, and the choice between them; signals get through."""

from __future__ import annotations

import queue
import signal
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu.session import CpuSession
from onelaunch.engines.cpu.threads import FIRST_LOOK, SAMPLES, Team
from tests.engines.cpu.runs import Bystander, Course, data, make


@pytest.fixture
def run() -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(50, 70),
        nn.BatchNorm1d(70),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(70, 64),
        nn.Tanh(),
        nn.Linear(64, 10),
    )
    x, y = data("cross_entropy", 200, 50, 10)
    return make(model, x, y, (x, y), epochs=4, batch_size=32, momentum=0.9)


def course(run: Run, place: Path, shares: int, helps: bool | None) -> Course:
    """The run with the other threads always (True), never (False) or in turns (None)."""
    import copy

    own = Run(run.spec, copy.deepcopy(run.model), run.network, "", run.x, run.y, run.validation, run.outputs)
    session = CpuSession(own, {}, place=place, shares=shares)
    calls = 0

    def note(seconds: float) -> None:
        nonlocal calls
        calls += 1
        session.team.helps = calls % 2 == 0 if helps is None else helps

    session.team.note = note  # type: ignore[method-assign, assignment]
    session.team.helps = bool(helps)
    segments = list(session.segments(0, Bystander()))
    session.snapshot()
    session.close()
    assert segments[-1].validation is not None
    return Course(
        torch.cat([s.losses for s in segments]), own.model, sum(s.correct or 0 for s in segments),
        segments[-1].validation.loss,
    )  # fmt: skip


@pytest.mark.parametrize("shares", [2, 3])
def test_the_bits_do_not_depend_on_who_computes_a_share(run: Run, shares: int, place: Path) -> None:
    first = course(run, place, shares, helps=True)
    for helps in (True, False, None):
        other = course(run, place, shares, helps=helps)
        assert torch.equal(first.losses, other.losses)
        assert (first.correct, first.validation) == (other.correct, other.validation)
        for name, tensor in first.model.state_dict().items():
            assert torch.equal(tensor, other.model.state_dict()[name]), name


def pace(team: Team, with_threads: float, alone: float, calls: int) -> list[bool]:
    taken = []
    for _ in range(calls):
        taken.append(team.helps)
        team.note(with_threads if team.helps else alone)
    return taken


def test_the_team_takes_the_faster_way_and_notices_a_change() -> None:
    """A look itself takes a few calls the slower way, so most calls are what counts."""
    team = Team(2, lambda: None)
    taken = pace(team, with_threads=1.0, alone=1.5, calls=2 * FIRST_LOOK)
    assert sum(taken) >= len(taken) - SAMPLES
    # Somebody else takes a core: waiting at barriers makes two threads slower than one.
    taken = pace(team, with_threads=4.0, alone=1.6, calls=100)
    assert sum(taken) <= 3 * FIRST_LOOK
    # The machine is free again: found out at the next look.
    pace(team, with_threads=1.0, alone=1.5, calls=200)
    taken = pace(team, with_threads=1.0, alone=1.5, calls=100)
    assert sum(taken) >= 90


def test_a_single_share_starts_no_thread() -> None:
    team = Team(1, lambda: None)
    before = threading.active_count()
    team.call(lambda: None, [])
    team.note(1.0)
    assert threading.active_count() == before
    assert not team.helps


def test_close_ends_the_threads(run: Run, place: Path) -> None:
    before = threading.active_count()
    session = CpuSession(run, {}, place=place, shares=2)
    next(iter(session.segments(0, Bystander())))
    session.close()
    session.close()
    assert threading.active_count() == before


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signals_are_served_while_it_runs(place: Path) -> None:
    """A long segment; a timer's handler must run in the middle of it, not at its end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 600), nn.ReLU(), nn.Linear(600, 10))
    x, y = data("cross_entropy", 64_000, 200, 10)
    session = CpuSession(make(model, x, y, epochs=1, batch_size=16), {}, place=place)
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


def test_a_call_whose_first_share_never_comes_ends(run: Run, place: Path) -> None:
    """A second Ctrl-C can strike after the other threads got their work and before this one began its own."""
    session = CpuSession(run, {}, place=place, shares=2)

    def interrupted(address: int) -> None:
        raise KeyboardInterrupt

    session._together["train"][0] = interrupted
    assert_ends(session)


class Struck(queue.SimpleQueue):
    """Ctrl-C strikes as soon as work is handed out."""

    def put(self, item: object, *_: object) -> None:
        super().put(item)
        if item is not None:
            raise KeyboardInterrupt


def test_a_call_interrupted_while_work_is_handed_out_ends(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = CpuSession(run, {}, place=place, shares=3)
    monkeypatch.setattr(queue, "SimpleQueue", Struck)
    assert_ends(session)


def assert_ends(session: CpuSession) -> None:
    session.team.helps = True

    def work() -> None:
        with pytest.raises(KeyboardInterrupt):
            next(session.segments(0, Bystander()))
        session.close()

    caller = threading.Thread(target=work, daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()
    assert all(not thread.name.startswith("onelaunch-") for thread in threading.enumerate())
