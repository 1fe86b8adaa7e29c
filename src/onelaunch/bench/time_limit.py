"""The time that `--quick` gives to a group of cases, or with `--limit` to all of them. Each case gets an equal part of what
is left; none runs past the end."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator

QUICK_SECONDS = 60.0  # per group, without --limit
MIN_CASE_SECONDS = 8.0
READY_SHARE = 0.6  # of the time left, for a contender to compile: something is left for the others
NAG_SECONDS = 0.5  # between two attempts to end work that swallows exceptions
OUT_OF_TIME = "left out by --quick: no time left"


class OutOfTimeError(Exception):
    """Raised inside work that was cut off."""


class TimeLimit:
    """An end of the time. Without `seconds` there is none, and nothing is ever cut off."""

    def __init__(self, seconds: float = math.inf, whole: TimeLimit | None = None) -> None:
        self._end = time.monotonic() + seconds
        self.whole = whole or self  # of the group, for the limit of a case
        self.too_slow: set[str] = set()  # contenders of the group that were not ready in time, and are not tried again

    def left(self) -> float:
        """Seconds; 0 when the time is over, infinite without a limit."""
        return max(0.0, self._end - time.monotonic())

    def part(self, cases_left: int) -> TimeLimit:
        """The limit of the next case, of so many."""
        return TimeLimit(min(self.left(), max(MIN_CASE_SECONDS, self.left() / cases_left)), self)

    def patience(self) -> float:
        """The seconds that a peer may take to be ready, in a case with this limit."""
        return max(MIN_CASE_SECONDS, READY_SHARE * self.left())

    @contextlib.contextmanager
    def cut(self, seconds: float = math.inf) -> Iterator[None]:
        """Raise OutOfTimeError inside the block after so many seconds, or when the time is over; also if the block ends later.

        Where there are no alarm signals (Windows, other threads), only at the end of the block.
        """
        seconds = min(seconds, self.left())
        if seconds == math.inf:
            yield
            return
        if seconds == 0:
            raise OutOfTimeError(OUT_OF_TIME)
        end = time.monotonic() + seconds
        with _alarm(seconds):
            yield
        if time.monotonic() > end:
            raise OutOfTimeError(OUT_OF_TIME)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the main thread after so many seconds, and again while the work goes on."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    armed = True

    def ring(number: int, frame: object) -> None:
        if armed:
            raise OutOfTimeError(OUT_OF_TIME)

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, NAG_SECONDS)
    try:
        try:
            yield
        finally:
            armed = False
    finally:  # on its own: the alarm may ring inside the first one
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
