"""`onelaunch report`: one page about runs and results."""

from __future__ import annotations

from pathlib import Path

import typer

from onelaunch.errors import OnelaunchError, unwritable_reason
from onelaunch.report.write import REPORT, write_report


def run_report(inputs: list[Path], out: Path | None) -> None:
    out = out or Path(REPORT)
    try:
        out = out / REPORT if out.is_dir() else out
    except OSError as error:  # a folder without read permission, or a name that is too long
        raise OnelaunchError(f"out={str(out)!r:.200} {unwritable_reason(error, 'pass another path')}") from error
    if out.suffix.lower() not in (".html", ".htm"):
        raise OnelaunchError(f"out={str(out)!r} must end in .html, or be a folder")
    page = write_report(inputs, out, lambda words: typer.echo(f"left out {words}", err=True))
    typer.echo(f"report   {page}")
