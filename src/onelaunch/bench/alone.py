"""One measurement at a time: processes build their cases side by side, and time them one after another.

Compiling the contenders of a real model takes minutes, timing them seconds. `benchmarks/record.py` therefore starts a process
per case and gives all of them the same lock file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

from onelaunch.bench.case import Work
from onelaunch.operating_system import lock

# The environment variable with the path of the lock file; not set for a process by itself.
LOCK = "ONELAUNCH_BENCH_LOCK"
# A contender with this in its name times kernels when it compiles, so it is not built beside others.
MEASURES = "max-autotune"


def build(contenders: Mapping[str, Work]) -> None:
    """Call each contender once beside other processes that do so, so that it compiles before it is this one's turn."""
    if LOCK in os.environ:
        with beside_others():
            for work in (work for name, work in contenders.items() if MEASURES not in name):
                with contextlib.suppress(Exception, SystemExit):  # `measure` says why a contender fails
                    work()


@contextlib.contextmanager
def beside_others() -> Iterator[None]:
    """Wait until no other process with the same lock file times anything, and keep it from doing so."""
    with _locked(shared=True):
        yield


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process with the same lock file builds or times anything."""
    with _locked(shared=False):
        yield


@contextlib.contextmanager
def _locked(*, shared: bool) -> Iterator[None]:
    if LOCK not in os.environ:
        yield
        return
    with open(os.environ[LOCK], "w", encoding="utf-8") as file:
        lock(file.fileno(), shared=shared, wait=True)
        yield
