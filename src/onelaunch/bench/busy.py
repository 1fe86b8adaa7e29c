"""Whether others use this machine: what they leave us of its cores when we ask for all of them.

The system's load average would be of no use: it remembers the last minute, in which we may have run a benchmark ourselves.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from pathlib import Path

from onelaunch.device import BUSY_SHARE, usable_cores

SECONDS, MOST_THREADS = 0.2, 32
BLOCK = bytes(2**20)  # hashed without Python's lock


@functools.cache
def cores_taken_before() -> float:
    """By others, before this process measured anything."""
    return cores_taken()


def cores_taken() -> float:
    """Cores that others use now, while we ask for all (or MOST_THREADS) of them."""
    threads = [threading.Thread(target=_work, args=(time.perf_counter() + SECONDS,)) for _ in range(_asked())]
    begin, used = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours = (time.process_time() - used) / (time.perf_counter() - begin)
    return max(0.0, len(threads) - ours)


class Watch:
    """What others take of the machine from here on: the system's busy time less ours, on as many cores as we may use."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores_taken(self) -> float:
        """On average since the start; what they take now, where the system keeps no such count."""
        clock, busy, own = self._begin
        now, seconds = _busy_seconds(), time.perf_counter() - clock
        if now is None or busy is None or seconds < SECONDS:
            return cores_taken()
        others = max(0.0, now - busy - (_own_seconds() - own)) / seconds
        return others * min(1.0, usable_cores() / (os.cpu_count() or 1))


def _busy_seconds() -> float | None:
    """Of all cores since the system started: all but idle and waiting for disks."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ticks = [int(field) for field in fields]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _own_seconds() -> float:
    return sum(os.times()[:4])  # with those of processes we started


def _asked() -> int:
    return min(usable_cores(), MOST_THREADS)


def _work(until: float) -> None:
    while time.perf_counter() < until:
        hashlib.sha256(BLOCK)


def warning(taken: float) -> str:
    """A line for people where times will be off; else empty."""
    if taken <= BUSY_SHARE * _asked():
        return ""
    return f"others use this machine ({taken:.1f} of {_asked()} cores): times will be off"
