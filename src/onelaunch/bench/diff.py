"""Compares two results files: what changed, what is noise, and what the machine did to all contenders."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onelaunch.bench.case import OURS
from onelaunch.errors import OnelaunchError

MIN_CHANGE = 0.02  # a smaller change is not acted on, however quiet the machine
QUIET = 0.1  # up to this noise, a change within it counts as none
NOISY = "too noisy to tell"


@dataclass(frozen=True)
class Change:
    """`ratio` is the new time divided by the old one, `noise` the factor by which the two spreads allow it to be off."""

    name: str
    verdict: str  # faster, slower, same, NOISY, machine, failed, mended, added, gone, left out, skipped
    before: float | None = None
    after: float | None = None
    ratio: float | None = None
    noise: float | None = None
    peers: float | None = None  # the median ratio of the peers' times, whose code did not change


def compare_results(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """The change of every case in either file. Raises OnelaunchError for a damaged file."""
    try:
        before, after = ({case["name"]: case for case in results["cases"]} for results in (old, new))
        return _changes(before, after, new.get("left_out", ()))
    except OnelaunchError:
        raise
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        raise OnelaunchError(
            f"a file is not as `onelaunch bench` writes it ({type(error).__name__}: {error}): take it again"
        ) from error


def _changes(before: dict[str, Any], after: dict[str, Any], left_out: Sequence[str]) -> list[Change]:
    if not before.keys() & after.keys():
        raise OnelaunchError("the two files have no case in common: pass results of the same `onelaunch bench` groups")
    gone = {name: Change(name, "left out" if name in left_out else "gone") for name in before if name not in after}
    return [gone.get(name) or _change(name, before.get(name), after[name]) for name in {**before, **after}]


def _change(name: str, old: dict[str, Any] | None, new: dict[str, Any]) -> Change:
    if old is None:
        return Change(name, "added")
    was, now = (case["times"].get(OURS) for case in (old, new))
    if now is None or was is None:
        if now is None and was is None:
            return Change(name, "failed" if new["check"].startswith("failed") else "skipped")
        return Change(name, "failed" if now is None else "mended")
    if not all(math.isfinite(one["median"]) and one["median"] > 0 for one in (was, now)):
        raise OnelaunchError(f"{name} took {was['median']}, then {now['median']} seconds: pass results with real times")
    ratio, noise = now["median"] / was["median"], (1 + was["spread"]) * (1 + now["spread"])
    peers = [
        new["times"][peer]["median"] / timing["median"]
        for peer, timing in old["times"].items()
        if peer != OURS and peer in new["times"]
    ]
    moved = statistics.median(peers) if peers else None
    verdict = NOISY if old.get("busy") or new.get("busy") else _verdict(ratio, noise, moved)
    return Change(name, verdict, was["median"], now["median"], ratio, noise, moved)


def _verdict(ratio: float, noise: float, peers: float | None) -> str:
    allowed = max(math.log(noise), math.log1p(MIN_CHANGE))
    change, moved = math.log(ratio), math.log(peers) if peers else 0.0
    if abs(change) <= allowed:
        return "same" if abs(change) <= math.log1p(MIN_CHANGE) and noise <= 1 + QUIET else NOISY
    # The peers' code is the same: where their times moved too, only a further change of ours can be due to our code.
    if change * moved > 0 and abs(moved) > allowed / 2 and abs(change) <= abs(moved) + allowed:
        return "machine"
    return "faster" if ratio < 1 else "slower"


def _machine_differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found = []
    for what, pick in (
        ("cpu", lambda machine: machine.get("cpu", {}).get("name")),
        ("gpu", lambda machine: ", ".join(gpu["name"] for gpu in machine.get("gpus", []))),
        ("driver", lambda machine: machine.get("driver")),
    ):
        one, other = pick(old), pick(new)
        if one != other:
            found.append(f"{what}: {one or 'none'}, then {other or 'none'}")
    versions = old.get("versions", {}), new.get("versions", {})
    for package in versions[0].keys() & versions[1].keys() - {"onelaunch"}:
        if versions[0][package] != versions[1][package]:
            found.append(f"{package}: {versions[0][package]}, then {versions[1][package]}")
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between the two runs besides our code, one line each."""
    try:
        found = _machine_differences(old.get("machine", {}), new.get("machine", {}))
    except (AttributeError, TypeError, KeyError):  # not written by onelaunch
        found = ["a file does not say on what machine it was taken"]
    if old.get("quick") != new.get("quick"):
        found.append("one of the two was taken with --quick")
    for which, results in (("old", old), ("new", new)):
        if results.get("finished") is False:
            found.append(f"the {which} one is unfinished: interrupted, killed or still running")
    return sorted(found)
