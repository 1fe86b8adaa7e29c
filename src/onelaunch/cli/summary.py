"""The last lines of `onelaunch train`: the result, the course of the loss, the speed, and what to do next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from onelaunch.cli.say import wrap
from onelaunch.format import format_number, format_seconds
from onelaunch.report.read import read_sources
from onelaunch.report.training import headline, network_of
from onelaunch.train.history import History

BLOCKS = "▁▂▃▄▅▆▇█"
COLUMNS = 24  # of the line of blocks


def summary_lines(run: Path, history: History) -> list[str]:
    """The lines about a finished run, styled for a terminal."""
    (source,) = read_sources(run, lambda words: None, lambda words: None)
    head, about = headline(source.content), source.content["about"]
    if head is None:
        return []
    result = head.words
    if head.more and head.more[0][0].startswith("always"):
        result += f" ({head.more[0][0]}: {head.more[0][1]})"
    first = f"{typer.style(head.figure, fg='blue', bold=True)}  {wrap(result, len(head.figure) + 2)}"
    first_loss, loss = history.epochs[0]["loss"], history.kept["loss"]
    course = f"training loss {format_number(loss)}"
    if first_loss != loss:
        course = f"training loss {format_number(first_loss)} → {format_number(loss)}"
    validation = history.kept["validation"]
    when = "" if history.best_epoch is None else f" in epoch {history.best_epoch + 1}, the best"
    course += f", validation {format_number(validation['loss'])}{when}" if validation else ""
    steps = len(history.losses)
    speed = f"{steps:,} steps of {format_seconds(history.seconds / steps)} on engine {history.engine}"
    size = f", {about['parameters']:,} parameters" if "parameters" in about else ""
    blocks = sparkline(history.losses)
    second = f"{typer.style(blocks, fg='blue')}  {wrap(course, len(blocks) + 2)}"
    return ["", first, second, wrap(f"{network_of(source.content)}{size}; {speed}", 0), ""]


def next_step(run: Path, is_table: bool) -> str:
    """The command that predicts with a run."""
    return f"onelaunch predict {shlex.quote(str(run))} {'new.csv' if is_table else 'rows.npy'}"


def sparkline(values: Sequence[float]) -> str:
    """The course of the values as blocks of different heights: means of equal stretches, logarithmic where all are positive."""
    columns = min(COLUMNS, len(values))
    parts = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(part) / len(part) for part in parts]
    if not all(map(math.isfinite, means)):
        return ""
    heights = [math.log(mean) for mean in means] if min(means) > 0 else means
    low, high = min(heights), max(heights)
    if high == low:
        return BLOCKS[0] * columns
    return "".join(BLOCKS[round((height - low) / (high - low) * (len(BLOCKS) - 1))] for height in heights)
