"""`onelaunch report`: one page about runs and results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.report.write import REPORT, write_report


def report(
    inputs: Annotated[list[Path], typer.Argument(help="Run folders, results files, or folders of either.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path(REPORT),
) -> None:
    """Draw runs and results as one self-contained HTML page. What cannot be read is named and left out."""
    try:
        out = out / REPORT if out.is_dir() else out
    except OSError as error:  # a folder that may not be looked into, a name that is too long
        raise OnelaunchError(
            f"out={str(out)!r:.200} cannot be written: {reason_of(error)}; pass another path"
        ) from error
    if out.suffix.lower() not in (".html", ".htm"):
        raise OnelaunchError(f"out={str(out)!r} must end in .html, or be a folder")
    page = write_report(inputs, out, lambda words: typer.echo(f"left out {words}", err=True))
    typer.echo(f"report   {page}")
