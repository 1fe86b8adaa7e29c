"""Energy per unit of work: the GPU's own counter between two of its ticks, while the GPU is kept busy.

Reading the counter takes milliseconds on some systems, and a GPU that waits meanwhile still draws its idle power. On an H200 a
loop of call, synchronise, read measured 0.2 J for a GEMM of 83 µs, which would be 2.5 kW. So the next calls are queued before
the counter is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from onelaunch.bench.case import Work

GIVE_UP_SECONDS = 1.0  # a counter that has not moved by then does not work here
BATCH_SECONDS = 0.01  # of work between two readings: one batch too many in a window of 0.3 s is an error of 3 %

Counter = Callable[[], int | None]  # millijoules
Mark = Callable[[], Work]  # marks the end of the queue; the Work it returns waits until the device gets there


def cuda_mark() -> Work:
    event = torch.cuda.Event()
    event.record()
    return event.synchronize


def joules(
    work: Work, *, units: int, call_seconds: float, seconds: float, counter: Counter, mark: Mark = cuda_mark
) -> float | None:
    """Joules per unit while `work` runs back to back for at least `seconds`; None where `counter` stands still.

    One call of `work` is `units` units and takes the device `call_seconds`.
    """
    calls = max(1, round(BATCH_SECONDS / call_seconds))
    window = _between_ticks(work, calls, seconds, counter, mark)
    return None if window is None else window.joules / (window.calls * units)


def watts(work: Work, *, seconds: float, counter: Counter, mark: Mark = cuda_mark) -> float | None:
    """The mean power while `work` runs: for work that waits for the device itself and does any number of units per call."""
    window = _between_ticks(work, 1, seconds, counter, mark)
    return None if window is None else window.joules / window.seconds


@dataclass(frozen=True)
class Window:
    joules: float
    seconds: float
    calls: int


def _between_ticks(work: Work, calls: int, seconds: float, counter: Counter, mark: Mark) -> Window | None:
    """Joules, seconds and calls between two ticks of the counter. The counter is read when one batch is done and the next is
    queued, so that each reading accounts for one batch."""

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
