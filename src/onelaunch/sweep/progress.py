"""The progress of a sweep: on a terminal a bar with members done, the best so far and the time left; elsewhere a line now
and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from onelaunch.format import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

LINE_SECONDS = 10.0  # between two lines


class SweepProgress:
    """Shows nothing: for `progress=False`, and the base class of the others."""

    @contextmanager
    def running(self, total: int, done: int) -> Iterator[None]:
        """Show the progress of `total` members, of which `done` are finished, inside the block."""
        yield

    def update(self, done: int, best: str) -> None:
        """`best`: the best value so far, as text."""


class LineSweepProgress(SweepProgress):
    def __init__(self, out: TextIO, seconds: float = LINE_SECONDS) -> None:
        self._out, self._seconds = out, seconds

    @contextmanager
    def running(self, total: int, done: int) -> Iterator[None]:
        self._total, self._first = total, done
        self._begin = self._said = time.perf_counter()
        self._last = (done, "")
        yield
        self._say(*self._last)

    def update(self, done: int, best: str) -> None:
        self._last = (done, best)
        now = time.perf_counter()
        if now - self._said >= self._seconds and done < self._total:
            self._said = now
            self._say(done, best)

    def _say(self, done: int, best: str) -> None:
        passed = time.perf_counter() - self._begin
        left = ""
        if self._first < done < self._total:
            left = f", {format_seconds(passed / (done - self._first) * (self._total - done))} left"
        with suppress(OSError, ValueError):  # the reader of a pipe is gone, or the stream is closed; the sweep goes on
            best = f", best member: {best}" if best else ""
            print(f"sweep {done:,}/{self._total:,} members{best}{left}", file=self._out, flush=True)


class TerminalSweepProgress(SweepProgress):
    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar

    @contextmanager
    def running(self, total: int, done: int) -> Iterator[None]:
        with self._bar:
            self._task = self._bar.add_task("sweep", total=total, completed=done, best="")
            yield

    def update(self, done: int, best: str) -> None:
        self._bar.update(self._task, completed=done, best=f"best member: {best}" if best else "")


def make_sweep_progress(enabled: bool) -> SweepProgress:
    """Nothing unless `enabled`; the bar on a terminal or in a notebook, else lines, both on standard error."""
    if not enabled:
        return SweepProgress()
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not console.is_terminal and not console.is_jupyter:
        return LineSweepProgress(sys.stderr)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("members"),
        TextColumn("{task.fields[best]}"), TimeRemainingColumn(),
    )  # fmt: skip
    return TerminalSweepProgress(RichProgress(*columns, console=console, transient=True))
