"""Energy of a unit of work: the card's own counter over whole ticks, so that its coarseness costs no accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onelaunch.bench.case import Work

GIVE_UP_SECONDS = 1.0  # a counter that has not moved by then does not work here


Counter = Callable[[], int | None]  # millijoules


def joules(
    work: Work, *, units: int, seconds: float, counter: Counter, settle: Work = torch.cuda.synchronize
) -> float | None:
    """Joules a unit while `work` runs back to back for at least `seconds`; None where `counter` stands still."""
    window = _between_ticks(work, seconds, counter, settle)
    return None if window is None else window.joules / (window.calls * units)


def watts(work: Work, *, seconds: float, counter: Counter, settle: Work = torch.cuda.synchronize) -> float | None:
    """The mean power meanwhile: for work that does as many units a call as it likes."""
    window = _between_ticks(work, seconds, counter, settle)
    return None if window is None else window.joules / window.seconds


@dataclass(frozen=True)
class Window:
    joules: float
    seconds: float
    calls: int


def _between_ticks(work: Work, seconds: float, counter: Counter, settle: Work) -> Window | None:
    """The clock of the measurement is the counter: it starts at one of its ticks and ends at another, and only calls between
    the two are counted.
    """
    first, _ = _run_to_tick(work, counter, settle, counter())
    if first is None:
        return None
    calls, last, begin = 0, first, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        at, made = _run_to_tick(work, counter, settle, last)
        if at is None:
            return None
        last, calls = at, calls + made
    return Window((last - first) / 1e3, time.perf_counter() - begin, calls)


def _run_to_tick(work: Work, counter: Counter, settle: Work, before: int | None) -> tuple[int | None, int]:
    """Work until the counter moves: where it stands then, and the calls made."""
    begin, calls = time.perf_counter(), 0
    while True:
        work()
        settle()
        calls += 1
        now = counter()
        if now is None or before is None:
            return None, calls
        if now != before:
            return now, calls
        if time.perf_counter() - begin > GIVE_UP_SECONDS:
            return None, calls
