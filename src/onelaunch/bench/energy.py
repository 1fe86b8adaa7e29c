"""Energy of a unit of work: the card's own counter over whole ticks, while the card is kept busy.

Reading the counter takes milliseconds on some systems, and a card that waits meanwhile still draws its idle power: on an H200 a
loop of call, synchronise, read made a product of 83 µs cost 0.2 J, 2.5 kW. So the next calls are queued before the counter
is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onelaunch.bench.case import Work

GIVE_UP_SECONDS = 1.0  # a counter that has not moved by then does not work here
BATCH_SECONDS = 0.01  # of work between two readings: an error of one in a window of 0.3 s is 3 %

Counter = Callable[[], int | None]  # millijoules
Mark = Callable[[], Work]  # notes what is queued by now; the Work it returns waits for that


def cuda_mark() -> Work:
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def joules(
    work: Work, *, units: int, call_seconds: float, seconds: float, counter: Counter, mark: Mark = cuda_mark
) -> float | None:
    """Joules a unit while `work`, which takes the device `call_seconds`, runs back to back for `seconds` or a little more; None
    where `counter` stands still."""
    calls = max(1, round(BATCH_SECONDS / call_seconds))
    window = _between_ticks(work, calls, seconds, counter, mark)
    return None if window is None else window.joules / (window.calls * units)


def watts(work: Work, *, seconds: float, counter: Counter, mark: Mark = cuda_mark) -> float | None:
    """The mean power meanwhile: for work that waits for itself, and does as many units a call as it likes."""
    window = _between_ticks(work, 1, seconds, counter, mark)
    return None if window is None else window.joules / window.seconds


@dataclass(frozen=True)
class Window:
    joules: float
    seconds: float
    calls: int


def _between_ticks(work: Work, calls: int, seconds: float, counter: Counter, mark: Mark) -> Window | None:
    """From one tick of the counter to another. A reading comes when one batch is done and the next is queued, so the calls
    between two readings are those of the batches between."""

    def queue() -> Work:
        for _ in range(calls):
            work()
        return mark()

    batch, readings = queue(), 0
    first: tuple[int, float, int] | None = None  # millijoules, clock, readings
    before = counter()
    moved = time.perf_counter()
    while True:
        following = queue()
        batch()
        batch, now, clock = following, counter(), time.perf_counter()
        readings += 1
        if now is None or before is None or (now == before and clock - moved > GIVE_UP_SECONDS):
            return None
        if now == before:
            continue
        before, moved = now, clock
        if first is None:
            first = (now, clock, readings)
        elif clock - first[1] >= seconds:
            batch()
            return Window((now - first[0]) / 1e3, clock - first[1], (readings - first[2]) * calls)
