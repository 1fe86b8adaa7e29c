"""The progress of a run: on a terminal a bar with loss, accuracy, samples per second and time left, elsewhere one line per
epoch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

from onelaunch.run.objective import predictions_per_row
from onelaunch.run.spec import Spec
from onelaunch.train.history import History, summary

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """Shows nothing: for `progress=False`, and the base class of the bar."""

    @contextmanager
    def running(self, spec: Spec, history: History, outputs: int) -> Iterator[None]:
        yield

    def update(self, step: int, loss: float, correct: int | None) -> None:
        """`correct` counts the correct predictions since the epoch began, or since the run resumed within it."""

    def epoch(self, record: dict[str, Any]) -> None:
        """Show the record of an epoch that has ended."""


class LineProgress(Progress):
    """One line per epoch, for a log file or a pipe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    @contextmanager
    def running(self, spec: Spec, history: History, outputs: int) -> Iterator[None]:
        self._epochs = spec.epoch_of(spec.total_steps - 1) + 1
        yield

    def epoch(self, record: dict[str, Any]) -> None:
        with suppress(OSError, ValueError):  # the reader of a pipe is gone, or the stream is closed; the run goes on
            print(_line(record, self._epochs), file=self._out, flush=True)


def _line(record: dict[str, Any], epochs: int) -> str:
    """The line of an epoch, at most 80 columns wide for usual numbers."""
    return f"epoch {record['epoch'] + 1}/{epochs}  {summary(record, short=True)}  {record['seconds']:.1f} s"


class TerminalProgress(Progress):
    """A bar in the terminal, and one line per epoch above it."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar

    @contextmanager
    def running(self, spec: Spec, history: History, outputs: int) -> Iterator[None]:
        self._spec = spec
        self._epochs = spec.epoch_of(spec.total_steps - 1) + 1
        self._per_row = predictions_per_row(spec, outputs)
        self._first = len(history.losses)  # the step at which the counts of this epoch begin
        self._begin_step, self._begin = self._first, time.perf_counter()
        with self._bar:
            self._task = self._bar.add_task(
                self._title(self._first), total=spec.total_steps, completed=self._first, loss="", accuracy="", rate=""
            )
            yield

    def _title(self, step: int) -> str:
        epoch = self._spec.epoch_of(min(step, self._spec.total_steps - 1))
        return f"epoch {epoch + 1}/{self._epochs}"

    def _rows(self, first: int, step: int) -> int:
        """Rows of the steps [first, step). A partial last batch counts as a full one, which is accurate enough for a bar."""
        return (step - first) * min(self._spec.batch_size, self._spec.rows)

    def update(self, step: int, loss: float, correct: int | None) -> None:
        rate = self._rows(self._begin_step, step) / max(1e-9, time.perf_counter() - self._begin)
        predictions = self._rows(self._first, step) * self._per_row
        accuracy = "" if correct is None or not predictions else f"accuracy {min(1, correct / predictions):.1%}"
        self._bar.update(
            self._task, completed=step, description=self._title(step), loss=f"loss {loss:.4f}", accuracy=accuracy,
            rate=f"{rate:,.0f} samples/s",
        )  # fmt: skip

    def epoch(self, record: dict[str, Any]) -> None:
        self._first = record["step"]
        self.update(record["step"], record["loss"], None)
        self._bar.console.print(_line(record, self._epochs), highlight=False, markup=False)


def make_progress(enabled: bool) -> Progress:
    """Nothing unless `enabled`; the bar on a terminal or in a notebook, else lines, both on standard error."""
    if not enabled:
        return Progress()
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    console = Console(stderr=True)
    if not console.is_terminal and not console.is_jupyter:
        return LineProgress(sys.stderr)
    fields = [TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "accuracy", "rate")]
    columns = (TextColumn("{task.description}"), BarColumn(), *fields, TimeRemainingColumn())
    return TerminalProgress(RichProgress(*columns, console=console, transient=True))
