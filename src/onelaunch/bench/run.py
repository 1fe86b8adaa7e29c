"""Runs cases: the check first, then the times; a case that fails its check has no times."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onelaunch.bench.case import GROUPS, REGISTRY, Case
from onelaunch.bench.measure import measure, peak_bytes
from onelaunch.device import describe_machine
from onelaunch.errors import OnelaunchError, UnsupportedError, reason_of, require_option
from onelaunch.files import write_atomic

OURS = "onelaunch"


def select(group: str, name_contains: str = "") -> list[Case]:
    """The cases of a group (or "all") whose name contains a string."""
    from onelaunch.bench import cases  # noqa: F401  the import fills the registry

    require_option("group", group, ("all", *GROUPS))
    chosen = [c for c in REGISTRY.values() if group in ("all", c.group) and name_contains in c.name]
    if not chosen:
        names = ", ".join(REGISTRY) or "none"
        raise OnelaunchError(f"no case of group {group!r} has {name_contains!r} in its name; there are: {names}")
    return chosen


def run_cases(cases: Iterable[Case], *, quick: bool, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run each case and show it at once; Ctrl-C keeps what is done."""
    results: list[dict[str, Any]] = []
    interrupted = False
    try:
        for one in cases:
            results.append(run_case(one, quick=quick))
            show(results[-1])
    except KeyboardInterrupt:
        interrupted = True
    return {
        "machine": describe_machine(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "interrupted": interrupted,
        "cases": results,
    }


def run_case(one: Case, *, quick: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"name": one.name, "group": one.group, "about": one.about, "unit": one.unit}
    try:
        trial = one.setup()
        trial.check()
    except UnsupportedError as error:
        return result | {"check": f"skipped: {error}", "times": {}}
    except Exception as error:  # whatever went wrong, the case is red and has no time
        reason = str(error).strip().splitlines()
        return result | {"check": f"failed: {type(error).__name__}: {reason[0] if reason else ''}", "times": {}}
    seconds, repeats = (1.0, 20) if quick else (6.0, 200)
    contenders = {OURS: trial.ours, **trial.peers}
    times, failed = measure(contenders, units=trial.units, cuda=trial.cuda, seconds=seconds, repeats=repeats)
    if OURS in failed:
        return result | {"check": f"failed: {failed[OURS]}", "times": {}}
    ours = times[OURS].median
    return result | {
        "check": "passed",
        "peak_bytes": {name: peak_bytes(work) for name, work in trial.memory.items()},
        "times": {name: timing.to_dict() for name, timing in times.items()},
        "ratio": {name: timing.median / ours for name, timing in times.items() if name != OURS},
        "floor_share": trial.floor_seconds / trial.units / ours if trial.floor_seconds else None,
        "absent": {**trial.absent, **failed},
    }


def failures(results: dict[str, Any]) -> list[str]:
    return [result["name"] for result in results["cases"] if result["check"].startswith("failed")]


def check_writable(path: Path) -> None:
    """Refuse a place where results could not be saved, without touching a file that is there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir() and os.access(path.parent, os.W_OK):
            return
        reason = "it is a folder" if path.is_dir() else "no permission"
    except (OSError, ValueError) as error:
        reason = reason_of(error)
    raise OnelaunchError(f"out={str(path)!r} cannot be written: {reason}; pass a writable path")


def save_results(results: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(results, indent=1) + "\n")
    except OSError as error:
        raise OnelaunchError(f"out={str(path)!r} cannot be written: {error.strerror}; pass a writable path") from error


def commit() -> str:
    """The commit of the checkout this package lies in, "+" added when files differ from it; empty when installed."""
    folder = Path(__file__).resolve().parent
    try:
        name = subprocess.run(
            ["git", "-C", folder, "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.stdout.strip()
