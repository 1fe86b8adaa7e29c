"""Results files: the figures, and where and when they were taken. JSON, written atomically."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onelaunch.bench.busy import Watch, cores_taken_before
from onelaunch.bench.gpu_state import current_gpu
from onelaunch.device import describe_machine
from onelaunch.errors import OnelaunchError, reason_of, unwritable_reason
from onelaunch.files import exclusive_lock, read_text, temporary_name, write_atomic
from onelaunch.train.history import json_ready
from onelaunch.version import VERSION

PEERS = ("jax", "jaxlib", "scikit-learn")
ROOM = 2**16  # free bytes that a place for results must have


def provenance(command: str) -> dict[str, Any]:
    """Chip, driver, versions, commit, date, and the command that takes these results again, as JSON values."""
    gpu, machine = current_gpu(), describe_machine()
    return {
        "command": command,
        "machine": machine
        | {"driver": gpu.driver() if gpu else None, "versions": machine["versions"] | peer_versions()},
        "commit": commit(),
        "source": tree_of(Path(__file__).resolve().parents[1]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores_taken": [round(cores_taken_before(), 2)],
    }


def peer_versions() -> dict[str, str]:
    """Versions of the installed peers, besides PyTorch."""
    found = {}
    for package in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def note_cores_taken(results: dict[str, Any], watch: Watch) -> float:
    """Add to the results how many cores others used since the watch began, and return it."""
    results["cores_taken"].append(round(watch.cores_taken(), 2))
    return float(results["cores_taken"][-1])


def commit() -> str:
    """The commit of this package's checkout, with "+" when files differ from it; empty for an installed package."""
    folder = Path(__file__).resolve().parent
    try:
        name = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.stdout.strip()


def tree_of(folder: Path) -> str:
    """git's hash of a folder with these files. `git rev-parse COMMIT:src/onelaunch` finds the commit, also of results that were
    taken without a git history."""

    def name(kind: str, content: bytes) -> bytes:
        return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).digest()

    def entry(path: Path) -> tuple[str, bytes]:
        if path.is_dir():
            return f"{path.name}/", f"40000 {path.name}\0".encode() + bytes.fromhex(tree_of(path))
        return path.name, f"100644 {path.name}\0".encode() + name("blob", path.read_bytes())

    kept = [path for path in folder.iterdir() if path.name != "__pycache__"]
    return name("tree", b"".join(line for _, line in sorted(map(entry, kept)))).hex()


def new_path() -> Path:
    """A new dated file under runs/, created with results without a case so that no other process takes the name."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        path = Path("runs") / (f"{stem}-bench.json" if number == 1 else f"{stem}-{number}-bench.json")
        check_writable(path)
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write('{"finished": false, "cases": []}\n')
        except FileExistsError:
            continue
        except OSError as error:
            raise _unwritable(path, reason_of(error)) from error
        return path
    raise OnelaunchError(f"out: a thousand files are called {stem}-bench.json: pass --out")


def check_writable(path: Path) -> None:
    """Raise OnelaunchError where results could not be saved. An existing file is left as it is."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.is_file():
            target = Path(os.path.realpath(path))
            trial = target.with_name(temporary_name(target))
            with open(trial, "xb", buffering=0) as file, contextlib.ExitStack() as stack:
                stack.callback(trial.unlink)
                file.write(bytes(ROOM))  # no file system answers this test wrongly
            return
        reason = "it is a folder" if path.is_dir() else "it is not a file"
    except (OSError, ValueError) as error:
        reason = reason_of(error)
    raise _unwritable(path, reason)


def _unwritable(path: Path, reason: str) -> OnelaunchError:
    return OnelaunchError(f"out={str(path)!r} cannot be written: {reason}; pass a writable path")


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Lock a results file, so that no other run overwrites what this one saves."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(Path(os.path.realpath(path))))
        except BlockingIOError as error:
            raise OnelaunchError(f"out={str(path)!r} is being written by another run: pass another path") from error
        except OSError as error:
            raise _unwritable(path, reason_of(error)) from error
        yield


def save_results(results: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(Path(os.path.realpath(path)), json.dumps(json_ready(results), indent=1) + "\n")
    except OSError as error:
        raise OnelaunchError(f"out={str(path)!r} {unwritable_reason(error)}") from error


def load_results(path: Path) -> dict[str, Any]:
    """The results of `onelaunch bench` in a file. Raises OnelaunchError for any other content."""
    try:
        results = json.loads(read_text(path))
    except OSError as error:
        raise OnelaunchError(
            f"{str(path)!r} cannot be read: {reason_of(error)}; pass what `onelaunch bench --out` wrote"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OnelaunchError(f"{str(path)!r} is not JSON: {error}; pass what `onelaunch bench --out` wrote") from error
    cases = results.get("cases") if isinstance(results, dict) else None
    if not isinstance(cases, list):
        raise OnelaunchError(f"{str(path)!r} holds no benchmark cases: pass what `onelaunch bench --out` wrote")
    for number, case in enumerate(cases):
        if not _is_case(case):
            raise OnelaunchError(
                f"{str(path)!r} is not as onelaunch {VERSION} writes it (case {number + 1} of {len(cases)}): take it again"
            )
    return results


def _is_case(case: Any) -> bool:
    """Whether `case` has a name, a check, and finite times."""
    try:
        texts = (case["name"], case["check"])
        figures = [figure for timing in case["times"].values() for figure in (timing["median"], timing["spread"])]
        return all(isinstance(text, str) for text in texts) and all(0 <= float(figure) < math.inf for figure in figures)
    except (KeyError, TypeError, AttributeError, OverflowError):
        return False
