"""Runs cases: the check first, then the times; a case that fails its check has no times."""

from __future__ import annotations

import contextlib
import difflib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from onelaunch.bench.busy import Watch, is_busy
from onelaunch.bench.case import FLOOR, GROUPS, OURS, REGISTRY, Case, Trial, Work
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.energy import joules, watts
from onelaunch.bench.gpu_state import current_gpu
from onelaunch.bench.measure import WARM_UPS, Timing, measure, one_line_reason, peak_bytes
from onelaunch.bench.results import note_cores_taken, provenance
from onelaunch.bench.time_limit import OUT_OF_TIME, QUICK_SECONDS, READY_SHARE, OutOfTimeError, TimeLimit
from onelaunch.errors import OnelaunchError, UnsupportedError, abbreviate_list, require_option
from onelaunch.train.interrupts import reraise_interrupts

MIN_LEFT = 1.0  # seconds: with less, no case of a group with a time limit is started
ENERGY_SECONDS = {True: 0.3, False: 0.5}  # of work back to back, for each contender; by `quick`


def select(groups: str | Iterable[str], name_contains: str = "") -> list[Case]:
    """The cases of some groups (or of "all") whose name contains a string, in the order the groups are named."""
    from onelaunch.bench import cases  # noqa: F401  importing it fills the registry

    groups = [groups] if isinstance(groups, str) else list(groups)
    for group in groups:
        require_option("group", group, ("all", *GROUPS))
    order = [group for name in groups for group in (GROUPS if name == "all" else (name,))]
    chosen = [
        c for group in dict.fromkeys(order) for c in REGISTRY.values() if c.group == group and name_contains in c.name
    ]
    if not chosen:
        names = [c.name for c in REGISTRY.values() if c.group in order]
        raise OnelaunchError(
            f"filter={name_contains!r} is in the name of no case of group {' '.join(groups)!r}: pass part of one of "
            f"{abbreviate_list(_nearest(name_contains, names)) or 'none'}"
        )
    return chosen


def _nearest(part: str, names: list[str]) -> list[str]:
    """The names sorted by the longest substring they share with `part`, of at least three letters; then by length."""

    def shared(name: str) -> int:
        matcher = difflib.SequenceMatcher(None, part.lower(), name.lower(), autojunk=False)
        size = matcher.find_longest_match().size
        return size if size > 2 else 0

    return sorted(names, key=lambda name: (-shared(name), len(name)))


def check_limit(limit: float | None) -> None:
    if limit is not None and not limit >= 0:  # also true of NaN
        raise OnelaunchError(f"limit={limit:g} must be 0 or more: pass seconds, or leave it out")


def run_cases(
    cases: Iterable[Case],
    *,
    quick: bool,
    show: Callable[[dict[str, Any]], None],
    save: Callable[[dict[str, Any]], None] = lambda results: None,
    announce: Callable[[str], None] = lambda words: None,
    command: str = "",
    limit: float | None = None,
) -> dict[str, Any]:
    """Run each case, and show and save it at once: after Ctrl-C or a kill the file holds what is done, with "finished" False.

    `limit`: seconds after which no further case is started. `quick`: few repeats, and no more than `limit` seconds, or without
    a `limit` QUICK_SECONDS per group, in which a case or a peer may be cut off. The results name the cases that were left out.
    `announce` is called with the number and name of each case, and with the time left.
    """
    check_limit(limit)
    cases = list(cases)
    ceilings = Ceilings()
    results: dict[str, Any] = {
        **provenance(command), "quick": quick, "finished": False, "interrupted": False, "ceilings": ceilings.measured,
        "planned": [one.name for one in cases], "left_out": [], "cases": [],
    }  # fmt: skip
    begin, watch = time.monotonic(), Watch()
    limits: dict[str, TimeLimit] = {}

    def seconds_left() -> float:
        """For a group that begins now; a `limit` counts from the first group on."""
        if not quick:
            return math.inf
        return QUICK_SECONDS if limit is None else max(0.0, begin + limit - time.monotonic())

    try:
        with reraise_interrupts() as check_interrupts:
            for number, one in enumerate(cases, 1):
                whole = limits.setdefault(one.group, TimeLimit(seconds_left()))
                rest = sum(limit is not None or other.group == one.group for other in cases[number - 1 :])
                if whole.left() < MIN_LEFT or (limit is not None and time.monotonic() - begin > limit):
                    results["left_out"].append(one.name)
                    continue
                left = f", {whole.left():.0f} s left" if whole.left() < math.inf else ""
                left += f" for {one.group}" if left and limit is None else ""
                announce(f"{number} of {len(cases)}: {one.name}{left}")  # a case may take minutes
                result = run_case(
                    one, quick=quick, ceilings=ceilings, check_interrupts=check_interrupts, limit=whole.part(rest)
                )
                if result["check"] == OUT_OF_TIME:
                    results["left_out"].append(one.name)
                    continue
                results["cases"].append(result)
                try:
                    save(results)
                finally:  # on a full disk the case is at least shown
                    show(results["cases"][-1])
                check_interrupts()
    except KeyboardInterrupt:
        results["interrupted"] = True
        if not results["cases"]:  # do not replace an older file with nothing
            return results
    except SystemExit:  # raised while showing: the reader closed the pipe
        results["interrupted"] = True
        save(results)
        raise
    else:
        results["finished"] = True
    note_cores_taken(results, watch)
    save(results)
    return results


def run_case(
    one: Case,
    *,
    quick: bool,
    ceilings: Ceilings,
    check_interrupts: Callable[[], None] = lambda: None,
    limit: TimeLimit | None = None,
) -> dict[str, Any]:
    """The check, times, energy and peak memory of a case, as JSON values. A case that fails its check has no times, nor has
    one whose check is OUT_OF_TIME, for which `limit` left no time."""
    limit = limit or TimeLimit()
    result: dict[str, Any] = {"name": one.name, "group": one.group, "about": one.about, "unit": one.unit}
    try:
        with limit.whole.cut(READY_SHARE * limit.whole.left()):
            trial = one.setup()
            trial.check()
    except OutOfTimeError:
        return result | {"check": OUT_OF_TIME, "times": {}}
    except UnsupportedError as error:
        return result | {"check": f"skipped: {error}", "times": {}}
    except (Exception, SystemExit) as error:  # whatever went wrong, the case has failed and has no times
        if isinstance(error.__cause__ or error.__context__, OutOfTimeError):
            return result | {"check": OUT_OF_TIME, "times": {}}
        return result | {"check": f"failed: {one_line_reason(error)}", "times": {}}
    gpu = current_gpu() if trial.cuda else None
    contenders = {OURS: trial.ours, **trial.peers, **({} if quick else trial.slow_peers)}
    left_out = dict.fromkeys(trial.slow_peers, "left out by --quick: long to compile") if quick else {}
    seconds, repeats = (1.0, 20) if quick else (6.0, 200)
    if trial.errors and not quick:
        seconds = math.inf  # a sample is a fold, and every fold counts
    watch = Watch()
    before = gpu.state() if gpu else None
    times, failed = measure(
        contenders, units=trial.units, cuda=trial.cuda, seconds=seconds,
        repeats=min(repeats, trial.repeats or repeats), self_timed=trial.self_timed, check_interrupts=check_interrupts,
        warm_ups=WARM_UPS if trial.warm_ups is None else trial.warm_ups, limit=limit, watch=watch,
    )  # fmt: skip
    taken = watch.cores_taken()
    after = gpu.state() if gpu else None
    used = _energy(contenders, times, trial, quick)
    if failed.get(OURS) == OUT_OF_TIME:
        return result | {"check": OUT_OF_TIME, "times": {}}
    if OURS in failed:
        return result | {"check": f"failed: {failed[OURS]}", "times": {}}
    ours = times[OURS].median
    return result | {
        "check": "passed",
        "times": {name: asdict(timing) for name, timing in times.items()},
        "ratio": {name: timing.median / ours for name, timing in times.items() if name != OURS},
        "absent": {**trial.absent, **left_out, **failed},
        "peak_bytes": _peaks(trial, failed),
        **_floor(trial, times, ceilings),
        "notes": dict(trial.notes),
        **({"errors": {name: trial.errors[name][: times[name].n] for name in times}} if trial.errors else {}),
        # CUDA events time the device, whatever others do with the cores.
        "cores_taken": round(taken, 2),
        "busy": is_busy(taken) and not trial.cuda,
        "gpu": {"before": before, "after": after} if gpu else None,
        "joules": used,
    }


def _peaks(trial: Trial, failed: Mapping[str, str]) -> dict[str, int]:
    """The peak of CUDA memory of each contender that has not failed."""
    measured = {name: work for name, work in trial.memory.items() if name not in failed}
    found = _of_each(measured, lambda name, work: peak_bytes(work))
    return found | {name: peak for name, peak in trial.peak_bytes.items() if name not in failed}


def _floor(trial: Trial, times: Mapping[str, Timing], ceilings: Ceilings) -> dict[str, Any]:
    """The seconds per unit of the lower bound, and their share of our time: 1 is as fast as the device was seen to be.

    The floor is the time of a contender called "floor: …"; without one, the work that must be done at the measured ceilings.
    """
    kind = "cuda" if trial.cuda else "cpu"
    # Measured even if not used here: the report draws the roofline from the ceilings.
    counted = ceilings.seconds(kind, trial.floor_bytes, trial.floor_flops, trial.floor_dtype)
    floor = next((timing.median for name, timing in times.items() if name.startswith(FLOOR)), None)
    if floor is None and counted is not None:
        floor = counted / trial.units
    amounts = {"bytes": trial.floor_bytes, "flops": trial.floor_flops}
    return {
        "floor_seconds": floor,
        "floor_share": None if floor is None else floor / times[OURS].median,
        "work": {name: amount / trial.units for name, amount in amounts.items() if amount is not None},
        "dtype": trial.floor_dtype,
    }


def _energy(contenders: Mapping[str, Work], times: Mapping[str, Timing], trial: Trial, quick: bool) -> dict[str, float]:
    """Joules per unit of each contender; for those that time themselves, mean power times seconds per unit."""
    gpu = current_gpu() if trial.cuda else None
    if gpu is None:
        return {}
    running, seconds = {name: contenders[name] for name in times}, ENERGY_SECONDS[quick]

    def of(name: str, work: Work) -> float | None:
        unit = times[name].median
        if trial.self_timed:
            power = watts(work, seconds=seconds, counter=gpu.millijoules)
            return None if power is None else power * unit
        call = trial.units * unit
        return joules(work, units=trial.units, call_seconds=call, seconds=seconds, counter=gpu.millijoules)

    return _of_each(running, of)


def _of_each(contenders: Mapping[str, Work], figure: Callable[[str, Work], Any]) -> dict[str, Any]:
    """A further figure of each contender, without those whose figure is None or whose function raises."""
    found = {}
    for name, work in contenders.items():
        with contextlib.suppress(Exception, SystemExit):
            found[name] = figure(name, work)
    return {name: value for name, value in found.items() if value is not None}


def failures(results: dict[str, Any]) -> list[str]:
    return [result["name"] for result in results["cases"] if result["check"].startswith("failed")]
