"""Assembles a report and writes it."""

from __future__ import annotations

import errno
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError, unwritable_reason
from onelaunch.files import write_atomic
from onelaunch.format import replace_control_characters
from onelaunch.report.benchmark import bench_sections
from onelaunch.report.comparison import compare_section
from onelaunch.report.figure import Section
from onelaunch.report.leaderboard import leaderboard
from onelaunch.report.page import page
from onelaunch.report.palette import Palette
from onelaunch.report.read import Complain, Source, read_sources
from onelaunch.report.remarks import OURS, is_ours
from onelaunch.report.training import run_section
from onelaunch.version import VERSION

REPORT = "report.html"


def write_report(inputs: Sequence[Path], out: Path, complain: Complain = lambda words: None) -> Path:
    """Write a page about run folders, results files and folders of either, and return its path.

    What cannot be shown is named to `complain` and on the page, other files of a folder to `complain` alone. Raises
    OnelaunchError where nothing can be shown or the page cannot be written.
    """
    drawn: list[tuple[Section, str]] = []
    left_out: list[str] = []
    sources: dict[Path, Source] = {}  # by path: a folder may be given together with a file in it
    for path in inputs:
        try:
            for source in read_sources(path, left_out.append, complain):
                sources.setdefault(source.path.resolve(), source)
        except OnelaunchError as error:
            left_out.append(str(error))
    _tell_apart(sources)
    palette = _palette(sources.values())
    runs: list[tuple[Source, str]] = []
    for source in sources.values():
        try:
            sections = _sections(source, f"part{len(drawn) + 1}", palette)
            drawn += [(section, section.html()) for section in sections]
            runs += [(source, sections[0].identity)] if source.kind == "run" else []
        except Exception as error:  # a file may hold anything; the other inputs are still drawn
            left_out.append(_unreadable_reason(source, error))
    if not drawn:
        more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
        raise OnelaunchError((left_out[0] if left_out else "inputs=[] is empty: pass a run folder or results") + more)
    for words in left_out:
        complain(words)
    command = shlex.join(["onelaunch", "report", *map(str, inputs)])
    if len(runs) > 1:
        board = leaderboard(runs, "runs", command, palette)
        drawn.insert(0, (board, board.html()))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        target = Path(os.path.realpath(out))  # write through a link to its file
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is not a file")
        # A path or a name may hold characters that UTF-8 cannot encode.
        write_atomic(target, replace_control_characters(page(drawn, command, left_out)).encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise OnelaunchError(f"out={str(out)!r} {unwritable_reason(error, 'pass another path')}") from error
    return out


def _tell_apart(sources: dict[Path, Source]) -> None:
    """Name runs by their paths where their folders have the same name."""
    names = [source.name for source in sources.values()]
    for path, source in sources.items():
        if names.count(source.name) > 1:
            sources[path] = replace(source, name=str(source.path))


def _palette(sources: Iterable[Source]) -> Palette:
    """Contenders, and runs, are told apart on the whole page, whichever of its figures they are in."""
    sources = list(sources)
    names = [name for source in sources if source.kind == "compare" for name in _contenders(source.content)]
    runs = [source.name for source in sources if source.kind == "run"]
    return Palette([OURS, *sorted(dict.fromkeys(names), key=lambda name: not is_ours(name))], runs)


def _contenders(content: dict[str, Any]) -> list[str]:
    """All names that the figures of a comparison may show; a damaged file has none."""
    sizes = content.get("sizes")
    parts = (content.get("contenders"), content.get("memory"), isinstance(sizes, dict) and sizes.get("step_seconds"))
    return [name for part in parts if isinstance(part, dict) for name in part]


def _sections(source: Source, identity: str, palette: Palette) -> list[Section]:
    if source.kind == "bench":
        return bench_sections(source, identity, palette)
    make = compare_section if source.kind == "compare" else run_section
    return [make(source, identity, palette)]


def _unreadable_reason(source: Source, error: Exception) -> str:
    machine = source.content.get("machine")
    versions = machine.get("versions") if isinstance(machine, dict) else None
    written = versions.get("onelaunch") if isinstance(versions, dict) else None
    remedy = "take it again"
    if isinstance(written, str) and written != VERSION:
        remedy = f"it was written by onelaunch {written:.20}, this is {VERSION}: {remedy}, or use that version"
    return f"{str(source.path)!r} is not as onelaunch writes it ({type(error).__name__}: {error!s:.80}): {remedy}"
