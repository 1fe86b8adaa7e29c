"""What a report is made from: run folders, results of `bench` and of `compare`, told apart by what is in them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.train.run_folder import ABOUT, COMPARE_FILE, CONFIG, METRICS

Complain = Callable[[str], None]  # told of each part that cannot be shown, in a line


@dataclass(frozen=True)
class Source:
    kind: str  # "run", "bench" or "compare"
    path: Path  # as it was given, so that a command with it works where the report was asked for
    name: str
    content: dict[str, Any]


def read_sources(path: Path, complain: Complain) -> list[Source]:
    """One run, comparison or results file; or, for any other folder, all that lie in it."""
    if not path.is_dir():
        found = _results(path)
        if found is None:
            raise OnelaunchError(
                f"{str(path)!r} is neither a result of `onelaunch bench` nor of `onelaunch compare`: pass one, or a run folder"
            )
        return [found]
    if (found := _folder(path)) is not None:
        return [found]
    sources, broken = [], 0
    for entry in sorted(path.iterdir()):
        try:
            one = _folder(entry) if entry.is_dir() else _results(entry) if entry.suffix == ".json" else None
        except OnelaunchError as error:
            complain(str(error))
            broken += 1
            continue
        sources += [one] if one else []
    if not sources and not broken:
        raise OnelaunchError(f"{str(path)!r} is neither a run folder nor a folder of results: it holds no results")
    return sources


def _folder(path: Path) -> Source | None:
    """The run or the comparison in a folder; None where it holds neither."""
    if (path / METRICS).is_file():
        return _run(path)
    if (path / COMPARE_FILE).is_file():
        return Source("compare", path, path.resolve().name, read_json(path / COMPARE_FILE))
    return None


def _results(path: Path) -> Source | None:
    """None for a file of another shape: a folder of results may hold logs and breakdowns too."""
    content = read_json(path)
    for kind, key, shape in (("bench", "cases", list), ("compare", "contenders", dict)):
        if isinstance(content, dict) and isinstance(content.get(key), shape):
            return Source(kind, path, path.stem, content)
    return None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OnelaunchError(
            f"{str(path)!r} cannot be read: {reason_of(error)}; pass a run folder or a results file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OnelaunchError(f"{str(path)!r} is not JSON: {str(error).splitlines()[0]}; take it again") from error


def _run(path: Path) -> Source:
    epochs = []
    try:
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise OnelaunchError(f"{str(path / METRICS)!r} cannot be read: {reason_of(error)}; pass another run") from error
    for line in lines:
        try:
            epoch = json.loads(line)
        except (ValueError, RecursionError):
            break  # the torn last line of a run that was killed
        epochs.append(epoch)
    about = read_json(path / ABOUT) if (path / ABOUT).is_file() else {}
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return Source("run", path, path.resolve().name, {"about": about, "epochs": epochs, "config": config})
