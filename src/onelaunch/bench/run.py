"""Runs cases: the check first, then the times; a case that fails its check has no times."""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onelaunch.bench.busy import Watch
from onelaunch.bench.case import FLOOR, GROUPS, REGISTRY, Case, Trial, Work
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.energy import joules, watts
from onelaunch.bench.gpu_state import current_gpu
from onelaunch.bench.measure import Timing, measure, peak_bytes, reason_in_a_line
from onelaunch.bench.results import OURS, note_cores_taken, provenance
from onelaunch.errors import OnelaunchError, UnsupportedError, abbreviate_list, require_option
from onelaunch.train.interrupts import reraise_interrupts

ENERGY_SECONDS = {True: 0.3, False: 1.0}  # of work back to back, for each contender; by `quick`


def select(groups: str | Iterable[str], name_contains: str = "") -> list[Case]:
    """The cases of some groups (or of "all") whose name contains a string, in the order the groups are named."""
    from onelaunch.bench import cases  # noqa: F401  the import fills the registry

    groups = [groups] if isinstance(groups, str) else list(groups)
    for group in groups:
        require_option("group", group, ("all", *GROUPS))
    order = [group for name in groups for group in (GROUPS if name == "all" else (name,))]
    chosen = [
        c for group in dict.fromkeys(order) for c in REGISTRY.values() if c.group == group and name_contains in c.name
    ]
    if not chosen:
        names = [c.name for c in REGISTRY.values() if c.group in order]
        wanted = " ".join(groups)
        raise OnelaunchError(
            f"filter={name_contains!r} is in the name of no case of group {wanted!r}: pass part of one of "
            f"{abbreviate_list(_nearest(name_contains, names)) or 'none'}"
        )
    return chosen


def _nearest(wanted: str, names: list[str]) -> list[str]:
    """Those first that share the longest stretch with what was wanted, where it is long enough not to be chance; short
    names before long ones."""

    def shared(name: str) -> int:
        matcher = difflib.SequenceMatcher(None, wanted.lower(), name.lower(), autojunk=False)
        size = matcher.find_longest_match().size
        return size if size > 2 else 0

    return sorted(names, key=lambda name: (-shared(name), len(name)))


def check_limit(limit: float | None) -> None:
    if limit is not None and not limit >= 0:  # which NaN is not either
        raise OnelaunchError(f"limit={limit:g} must be 0 or more: pass seconds, or leave it out")


def run_cases(
    cases: Iterable[Case],
    *,
    quick: bool,
    show: Callable[[dict[str, Any]], None],
    save: Callable[[dict[str, Any]], None] = lambda results: None,
    announce: Callable[[str], None] = lambda name: None,
    command: str = "",
    limit: float | None = None,
) -> dict[str, Any]:
    """Run each case, show and save it at once: Ctrl-C, or a kill, keeps what is done, with "finished" False.

    `limit`: seconds after which no further case is started; the results name those left out.
    """
    check_limit(limit)
    cases = list(cases)
    ceilings = Ceilings()
    results: dict[str, Any] = {
        **provenance(command), "quick": quick, "finished": False, "interrupted": False, "ceilings": ceilings.measured,
        "planned": [one.name for one in cases], "left_out": [], "cases": [],
    }  # fmt: skip
    begin, watch = time.monotonic(), Watch()
    try:
        with reraise_interrupts() as check_interrupts:
            for one in cases:
                if limit is not None and time.monotonic() - begin > limit:
                    results["left_out"].append(one.name)
                    continue
                announce(one.name)  # a case may take minutes
                results["cases"].append(
                    run_case(one, quick=quick, ceilings=ceilings, check_interrupts=check_interrupts)
                )
                try:
                    save(results)
                finally:  # on a full disk it is at least to be seen
                    show(results["cases"][-1])
                check_interrupts()
    except KeyboardInterrupt:
        results["interrupted"] = True
        if not results["cases"]:  # nothing that would be worth an older file in its place
            return results
    except SystemExit:  # of showing it: nobody reads on
        results["interrupted"] = True
        save(results)
        raise
    else:
        results["finished"] = True
    note_cores_taken(results, watch)
    save(results)
    return results


def run_case(
    one: Case, *, quick: bool, ceilings: Ceilings, check_interrupts: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    result: dict[str, Any] = {"name": one.name, "group": one.group, "about": one.about, "unit": one.unit}
    try:
        trial = one.setup()
        trial.check()
    except UnsupportedError as error:
        return result | {"check": f"skipped: {error}", "times": {}}
    except (Exception, SystemExit) as error:  # whatever went wrong, the case is red and has no time
        return result | {"check": f"failed: {reason_in_a_line(error)}", "times": {}}
    gpu = current_gpu() if trial.cuda else None
    contenders = {OURS: trial.ours, **trial.peers}
    before = gpu.state() if gpu else None
    seconds, repeats = (1.0, 20) if quick else (6.0, 200)
    times, failed = measure(
        contenders, units=trial.units, cuda=trial.cuda, seconds=seconds, repeats=min(repeats, trial.repeats or repeats),
        self_timed=trial.self_timed, check_interrupts=check_interrupts,
    )  # fmt: skip
    after = gpu.state() if gpu else None
    if OURS in failed:
        return result | {"check": f"failed: {failed[OURS]}", "times": {}}
    ours = times[OURS].median
    return result | {
        "check": "passed",
        "times": {name: timing.to_dict() for name, timing in times.items()},
        "ratio": {name: timing.median / ours for name, timing in times.items() if name != OURS},
        "absent": {**trial.absent, **failed},
        "peak_bytes": _of_each(
            {name: work for name, work in trial.memory.items() if name not in failed},
            lambda name, work: peak_bytes(work),
        ),
        **_floor(trial, times, ceilings),
        "notes": dict(trial.notes),
        "gpu": {"before": before, "after": after} if gpu else None,
        "joules": _energy(contenders, times, trial, quick),
    }


def _floor(trial: Trial, times: Mapping[str, Timing], ceilings: Ceilings) -> dict[str, Any]:
    """Seconds a unit that nothing can beat, and how near we come: 1 is as fast as the device allows.

    A contender called "floor: …" was timed doing the least; else what must be moved and computed is set against ceilings.
    """
    kind = "cuda" if trial.cuda else "cpu"
    # Asked for in any case: the report draws the roofline from them.
    counted = ceilings.seconds(kind, trial.floor_bytes, trial.floor_flops, trial.floor_dtype)
    floor = next((timing.median for name, timing in times.items() if name.startswith(FLOOR)), None)
    if floor is None:
        whole = trial.floor_seconds if trial.floor_seconds is not None else counted
        floor = None if whole is None else whole / trial.units
    amounts = {"bytes": trial.floor_bytes, "flops": trial.floor_flops}
    return {
        "floor_seconds": floor,
        "floor_share": None if floor is None else floor / times[OURS].median,
        "work": {name: amount / trial.units for name, amount in amounts.items() if amount is not None},
        "dtype": trial.floor_dtype,
    }


def _energy(contenders: Mapping[str, Work], times: Mapping[str, Timing], trial: Trial, quick: bool) -> dict[str, float]:
    """Joules a unit of each contender; of those that time themselves, the mean power by the time of a unit."""
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
    """A further figure of each contender; one that cannot be had is left out, and stops nobody."""
    found = {}
    for name, work in contenders.items():
        with contextlib.suppress(Exception, SystemExit):
            found[name] = figure(name, work)
    return {name: value for name, value in found.items() if value is not None}


def failures(results: dict[str, Any]) -> list[str]:
    return [result["name"] for result in results["cases"] if result["check"].startswith("failed")]
