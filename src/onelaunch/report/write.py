"""Puts a report together and writes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.files import write_atomic
from onelaunch.report.benchmark import bench_sections
from onelaunch.report.comparison import compare_section
from onelaunch.report.figure import Section
from onelaunch.report.page import page
from onelaunch.report.read import read_sources
from onelaunch.report.training import run_section

REPORT = "report.html"


def write_report(inputs: Sequence[Path], out: Path) -> Path:
    """A page about run folders, results files and folders of results. Nothing is written when an input cannot be read."""
    sections: list[Section] = []
    for path in inputs:
        for source in read_sources(path):
            identity = f"part{len(sections) + 1}"
            try:
                if source.kind == "bench":
                    sections += bench_sections(source, identity)
                elif source.kind == "compare":
                    sections.append(compare_section(source, identity))
                else:
                    sections.append(run_section(source, identity))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                raise OnelaunchError(
                    f"{source.name!r} is not as onelaunch writes it ({type(error).__name__}: {error}): take it again"
                ) from error
    html = page(sections, f"onelaunch report {' '.join(path.name for path in inputs)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, html)
    except OSError as error:
        raise OnelaunchError(f"out={str(out)!r} cannot be written: {reason_of(error)}; pass another path") from error
    return out
