"""Whether others use this machine: what they leave us of its cores when we ask for all of them.

The system's load average would be of no use: it remembers the last minute, in which we may have run a benchmark ourselves.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time

from onelaunch.device import usable_cores

SECONDS, MOST_THREADS = 0.2, 32
BLOCK = bytes(2**20)  # hashed without Python's lock
TOO_MANY = 0.25  # of the cores


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


def _asked() -> int:
    return min(usable_cores(), MOST_THREADS)


def _work(until: float) -> None:
    while time.perf_counter() < until:
        hashlib.sha256(BLOCK)


def warning(taken: float) -> str:
    """A line for people where times will be off; else empty."""
    if taken <= TOO_MANY * _asked():
        return ""
    return f"others use this machine ({taken:.1f} of {_asked()} cores): times will be off"
