"""What a command prints: one line per fact, which begins with its kind."""

from __future__ import annotations

import os
import sys

import typer

from onelaunch.run.distributed import world


def say(what: str, text: str) -> None:
    """Print one line, on rank 0 only."""
    echo(f"{what:<8} {text}")


def echo(line: str) -> None:
    """Print a line, on rank 0 only."""
    if not world().leads:
        return
    try:
        typer.echo(line)
    except OSError:  # the reader of a pipe is gone (`| head -1`); the run goes on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
