"""How many cores other processes use while we measure.

The system's load average does not tell: it covers the last minute, in which we may have run a benchmark ourselves.
"""

from __future__ import annotations

import functools
import hashlib
import os
import threading
import time
from pathlib import Path

from onelaunch.device import BUSY_SHARE
from onelaunch.operating_system import usable_cores

BUSY = "machine busy"  # in place of a ratio
SECONDS, MAX_THREADS = 0.2, 32
BLOCK = bytes(2**20)  # hashing this releases Python's lock


@functools.cache
def cores_taken_before() -> float:
    """The cores that others used before this process measured anything."""
    return cores_taken()


def cores_taken() -> float:
    """The cores that others use now: those that we ask for (all, or MAX_THREADS) and do not get."""
    threads = [threading.Thread(target=_work, args=(time.perf_counter() + SECONDS,)) for _ in range(_thread_count())]
    begin, used = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours = (time.process_time() - used) / (time.perf_counter() - begin)
    return max(0.0, len(threads) - ours)


class Watch:
    """The cores that others use from now on: the busy time of the cores that we may use, minus our own."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._begin = time.perf_counter(), _busy_seconds(), _own_seconds()

    def cores_taken(self) -> float:
        """The average since the start; the cores in use now, where the system keeps no count of busy time."""
        clock, busy, own = self._begin
        now, seconds = _busy_seconds(), time.perf_counter() - clock
        if now is None or busy is None or seconds < SECONDS:
            return cores_taken()
        return max(0.0, now - busy - (_own_seconds() - own)) / seconds


def _busy_seconds() -> float | None:
    """Seconds that the cores we may use were busy since the system started, neither idle nor waiting for disks."""
    try:
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        ticks = [[int(field) for field in fields[1:9]] for fields in lines if fields[0] in ours]
        seconds = sum(sum(fields) - fields[3] - fields[4] for fields in ticks) / os.sysconf("SC_CLK_TCK")
        return seconds if ticks else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _own_seconds() -> float:
    """Of this process and of those that it started, whether they have ended or not."""
    return sum(os.times()[:4]) + _seconds_of_descendants()


def _seconds_of_descendants() -> float:
    """CPU time of the processes below this one that run now, such as scikit-learn's workers; 0 where /proc does not tell."""
    parents: dict[int, tuple[int, int]] = {}  # by process: its parent, and its ticks with those of its ended children
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()  # the name before it may hold anything
            parents[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
    own, found = {os.getpid()}, 0
    while below := {number for number, (parent, _) in parents.items() if parent in own and number not in own}:
        own |= below
        found += sum(parents[number][1] for number in below)
    return found / os.sysconf("SC_CLK_TCK") if found else 0.0


def _thread_count() -> int:
    return min(usable_cores(), MAX_THREADS)


def _work(until: float) -> None:
    while time.perf_counter() < until:
        hashlib.sha256(BLOCK)


def is_busy(taken: float) -> bool:
    """Whether others use so many cores that a ratio of two times means nothing."""
    return taken > BUSY_SHARE * _thread_count()


def warning(taken: float) -> str:
    """One line for the user where others use so much that times will be off; else empty."""
    if not is_busy(taken):
        return ""
    return f"others use this machine ({taken:.1f} of {_thread_count()} cores): times will be off"


def remark(taken: float) -> str:
    """One line about times that were measured while others used this many cores."""
    return f"{BUSY}: others used {taken:.1f} cores meanwhile, so the times cannot be compared"
