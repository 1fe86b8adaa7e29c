"""Energy of a unit of work: the card's own counter over whole ticks, so that its coarseness costs no accuracy."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from onelaunch.bench.case import Work

GIVE_UP_SECONDS = 1.0  # a counter that has not moved by then does not work here


def joules(
    work: Work, *, units: int, seconds: float, counter: Callable[[], int | None], settle: Work = torch.cuda.synchronize
) -> float | None:
    """Joules a unit while `work` runs back to back for at least `seconds`; None where `counter` (millijoules) stands still.

    The clock of the measurement is the counter: it starts at one of its ticks and ends at another, and only calls between
    the two are counted.
    """
    begin = time.perf_counter()
    first, _ = _run_to_tick(work, counter, settle, begin, counter())
    if first is None:
        return None
    calls, last, begin = 0, first, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        at, made = _run_to_tick(work, counter, settle, time.perf_counter(), last)
        if at is None:
            return None
        last, calls = at, calls + made
    return (last - first) / 1e3 / (calls * units)


def _run_to_tick(
    work: Work, counter: Callable[[], int | None], settle: Work, begin: float, before: int | None
) -> tuple[int | None, int]:
    """Work until the counter moves: where it stands then, and the calls made."""
    calls = 0
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
