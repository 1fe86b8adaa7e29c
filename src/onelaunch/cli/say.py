"""What a command prints: one line per fact, which begins with its kind."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap

import typer

from onelaunch.run.distributed import world

COPIED = ("stopped", "curves", "run", "report", "table", "page", "predict")  # commands and paths


def say(what: str, text: str) -> None:
    """Print one line, on rank 0 only; on a terminal, wrapped unless users copy the text."""
    begin = f"{what:<8} "
    echo(begin + (text if what in COPIED else wrap(text, len(begin))))


def wrap(text: str, indent: int) -> str:
    """The text in lines that fit into the terminal beside an indent, which all but the first have. One line, as logs are
    searched by, where standard output is not a terminal."""
    if not sys.stdout.isatty():
        return text
    width = max(20, shutil.get_terminal_size().columns - indent)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * indent).join(lines)


def echo(line: str) -> None:
    """Print a line, on rank 0 only."""
    if not world().leads:
        return
    try:
        typer.echo(line)
    except OSError:  # the reader of a pipe is gone (`| head -1`); the run goes on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
