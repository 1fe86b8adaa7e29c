"""The inputs of a report: run folders, results of `bench` and of `compare`, told apart by their content."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.files import read_text
from onelaunch.train.run_folder import ABOUT, COMPARE_FILE, CONFIG, METRICS, MODEL, PREDICTIONS, TABLE

Complain = Callable[[str], None]  # called with one line for each part that cannot be shown


@dataclass(frozen=True)
class Source:
    kind: str  # "run", "bench" or "compare"
    path: Path  # as the user gave it, so that shown commands work in the user's folder
    name: str
    content: dict[str, Any]


def read_sources(path: Path, complain: Complain, mention: Complain) -> list[Source]:
    """One run, comparison or results file; for any other folder, all those in it.

    `complain` is called with what cannot be shown, `mention` with other JSON files in the folder. Raises OnelaunchError where
    nothing can be read.
    """
    if (found := _source(path, complain)) is not None:
        return [found]
    if not path.is_dir():
        raise OnelaunchError(
            f"{str(path)!r} is neither a result of `onelaunch bench` nor of `onelaunch compare`: pass one, or a run folder"
        )
    sources: list[Source] = []
    others, broken = [], 0
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise _unreadable(path, error) from error
    for entry in entries:
        try:
            one = _source(entry, complain, only=".json")
        except OnelaunchError as error:
            complain(str(error))
            broken += 1
            continue
        if one is None and entry.is_file() and entry.name.endswith(".json"):
            others.append(entry.name)
        sources += [one] if one else []
    if others and sources:
        mention(
            f"not a result of `onelaunch bench` or `onelaunch compare` in {str(path)!r}: {', '.join(map(repr, others))}"
        )
    if not sources and not broken:
        raise OnelaunchError(f"{str(path)!r} is neither a run folder nor a folder of results: it holds no results")
    return sources


def _source(path: Path, complain: Complain, only: str = "") -> Source | None:
    """The source at a path; None for anything else, and for a file whose name does not end in `only`."""
    try:
        if path.is_dir():
            return _folder(path, complain)
        return _results(path) if path.name.endswith(only) else None
    except OSError as error:
        raise _unreadable(path, error) from error


def _folder(path: Path, complain: Complain) -> Source | None:
    """The run or the comparison in a folder; None where it holds neither."""
    if (path / METRICS).is_file():
        return _run(path, complain)
    if (path / COMPARE_FILE).is_file():
        found = _results(path / COMPARE_FILE)
        if found is None or found.kind != "compare":
            raise OnelaunchError(
                f"{str(path / COMPARE_FILE)!r} holds no comparison: take it again with `onelaunch compare --out`"
            )
        return Source("compare", path, path.resolve().name, found.content)
    return None


def _results(path: Path) -> Source | None:
    """The results in a file; None for a file of another kind: a folder of results may hold logs and breakdowns too."""
    content = read_json(path)
    for kind, key, shape in (("bench", "cases", list), ("compare", "contenders", dict)):
        if isinstance(content, dict) and isinstance(content.get(key), shape):
            return Source(kind, path, path.stem, content)
    return None


def unfinished(content: dict[str, Any]) -> list[tuple[str, str]]:
    """A statement about results that are not complete. Older files do not say, and count as complete."""
    if content.get("interrupted"):
        return [("bad", "Interrupted: this is what was done.")]
    if content.get("finished", True) is False:
        return [("bad", "Unfinished: it is still running or was killed. This is what was done.")]
    return []


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise OnelaunchError(f"{str(path)!r} is not JSON: {str(error).splitlines()[0]}; take it again") from error


def _unreadable(path: Path, error: OSError) -> OnelaunchError:
    return OnelaunchError(f"{str(path)!r} cannot be read: {reason_of(error)}; pass a run folder or a results file")


def _run(path: Path, complain: Complain) -> Source:
    epochs = []
    try:
        lines = read_text(path / METRICS).splitlines()
    except (OSError, ValueError) as error:
        raise OnelaunchError(f"{str(path / METRICS)!r} cannot be read: {reason_of(error)}; pass another run") from error
    about = read_json(path / ABOUT) if (path / ABOUT).is_file() else {}
    for number, line in enumerate(lines, 1):
        try:
            epoch = json.loads(line)
        except (ValueError, RecursionError):
            # The last line of a run that was killed may be cut off; that of a finished run is not.
            if number < len(lines) or (isinstance(about, dict) and about.get("status") == "finished"):
                where = f"{str(path / METRICS)!r}: line {number} of {len(lines)} is not JSON"
                complain(f"{where}: nothing after it is shown; `onelaunch train --resume {path}` writes it anew")
            break
        epochs.append(epoch)
    try:
        config = tomllib.loads(read_text(path / CONFIG))
    except (OSError, ValueError):
        config = {}
    content = {"about": about, "epochs": epochs, "config": config, "predictions": _predictions(path, complain)}
    content |= {"has_model": (path / MODEL).is_file(), "is_table": (path / TABLE).is_file()}
    return Source("run", path, path.resolve().name, content)


def _predictions(path: Path, complain: Complain) -> dict[str, Any]:
    """The content of a run's predictions.json; empty for a run without one, and for one that cannot be read."""
    if not (path / PREDICTIONS).is_file():
        return {}
    try:
        found = read_json(path / PREDICTIONS)
    except OnelaunchError as error:
        complain(str(error))
        return {}
    return found if isinstance(found, dict) else {}
