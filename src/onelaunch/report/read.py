"""What a report is made from: run folders, results of `bench` and of `compare`, told apart by what is in them."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.train.run_folder import ABOUT, COMPARE_FILE, CONFIG, METRICS


@dataclass(frozen=True)
class Source:
    kind: str  # "run", "bench" or "compare"
    name: str
    content: dict[str, Any]


def read_sources(path: Path) -> list[Source]:
    """One run or one results file; or, for any other folder, every results file in it."""
    if path.is_dir():
        if (path / METRICS).is_file():
            return [_run(path)]
        if (path / COMPARE_FILE).is_file():
            path = path / COMPARE_FILE
            return [Source("compare", path.resolve().parent.name, read_json(path))]
        found = [source for file in sorted(path.glob("*.json")) if (source := _results(file, file.stem))]
        if not found:
            raise OnelaunchError(f"{str(path)!r} is neither a run folder nor a folder of results: it holds no results")
        return found
    source = _results(path, path.stem)
    if source is None:
        raise OnelaunchError(
            f"{str(path)!r} is neither a result of `onelaunch bench` nor of `onelaunch compare`: pass one, or a run folder"
        )
    return [source]


def _results(path: Path, name: str) -> Source | None:
    """None for a file of another shape: a folder of results may hold logs and breakdowns too."""
    content = read_json(path)
    for kind, key, shape in (("bench", "cases", list), ("compare", "contenders", dict)):
        if isinstance(content, dict) and isinstance(content.get(key), shape):
            return Source(kind, name, content)
    return None


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OnelaunchError(
            f"{str(path)!r} cannot be read: {reason_of(error)}; pass a run folder or a results file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OnelaunchError(f"{str(path)!r} is not JSON: {str(error).splitlines()[0]}") from error


def _run(path: Path) -> Source:
    epochs = []
    try:
        lines = (path / METRICS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise OnelaunchError(f"{str(path / METRICS)!r} cannot be read: {reason_of(error)}; pass another run") from error
    for line in lines:
        try:
            epochs.append(json.loads(line))
        except ValueError:
            break  # the torn last line of a run that was killed
    about = read_json(path / ABOUT) if (path / ABOUT).is_file() else {}
    try:
        config = tomllib.loads((path / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return Source("run", path.resolve().name, {"about": about, "epochs": epochs, "config": config})
