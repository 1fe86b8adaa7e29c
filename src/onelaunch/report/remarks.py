"""What to say of a comparison besides its figures: what failed or diverged, what was too short to tell, what was not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onelaunch.errors import abbreviate_list

OURS = "onelaunch"
MOST_APART, LEAST_LOSS = 2.0, 1e-3  # final losses, one over the other; beside the first losses, what is as good as none
MOST_ONCE = 0.1  # of a run's time: beyond, what it costs once is much of what a step seems to take

Remark = tuple[str, str]  # its kind, "bad" or "note", and the words


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def remarks(results: dict[str, Any]) -> list[Remark]:
    """For the terminal and the page alike; of files of older versions, which hold less, nothing."""
    found = [*_failed(results), *_diverged(results), *_apart(results), *_too_short(results), *_of_sizes(results)]
    return [*found, *_not_run(results)]


def is_red(results: dict[str, Any]) -> bool:
    """Whether an engine of ours failed, parted from PyTorch, or went on where PyTorch diverged; or a size could not be made."""
    sizes = results.get("sizes") or {}
    contenders = results.get("contenders", {})
    reference = next((one.get("diverged_step") for one in contenders.values()), None)
    return bool(results.get("failed") or sizes.get("left_out") or sizes.get("failed") or _apart(results)) or any(
        is_ours(name)
        and (bool(one["gap"] and not one["gap"]["agrees"]) or (one.get("diverged_step") is None) != (reference is None))
        for name, one in contenders.items()
    )


def _failed(results: dict[str, Any]) -> list[Remark]:
    return [("bad", f"{name} failed: {reason}") for name, reason in results.get("failed", {}).items()]


def _diverged(results: dict[str, Any]) -> list[Remark]:
    """Everybody who did, with the step; and who did not, where PyTorch did."""
    contenders = results.get("contenders", {})
    steps = {name: one["diverged_step"] for name, one in contenders.items() if one.get("diverged_step") is not None}
    steps |= results.get("diverged", {})  # those that end by themselves are no longer among the contenders
    if not steps:
        return []
    if len(set(steps.values())) == 1:
        where = f"at step {next(iter(steps.values())):,}"
    else:
        where = ", ".join(f"{name} at step {step:,}" for name, step in steps.items())
    both = {1: "", 2: "both "}.get(len(steps), "all ")
    said = [
        ("bad", f"{_together(list(steps))} {both}diverged ({where}): the loss is no longer finite; pass a smaller lr")
    ]
    reference = next(iter(contenders), "")
    if reference in steps and (others := [name for name in contenders if name not in steps]):
        said.append(("bad", f"{_together(others)} did not diverge as {reference} did"))
    return said


def _apart(results: dict[str, Any]) -> list[Remark]:
    """Engines of ours whose weights end with another loss than PyTorch's, whatever their curves say."""
    found = []
    contenders = results.get("contenders", {})
    ends = {name: ((one.get("final") or {}).get("loss") or {}).get("mean") for name, one in contenders.items()}
    reference, expected = next(iter(ends.items()), ("", None))
    for name, loss in ends.items():
        if is_ours(name) and loss and expected:
            least, most = sorted((abs(loss), abs(expected)))
            begin = next((abs(value) for value in contenders[name]["curve"]["mean"] if value), 0.0)
            if most > MOST_APART * least and most > LEAST_LOSS * begin:
                words = f"{name} ends with a loss of {loss:.3g} where {reference} has {expected:.3g}"
                found.append(("bad", f"{words}: its weights are not those of its curve"))
    return found


def _together(names: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _too_short(results: dict[str, Any]) -> list[Remark]:
    """Contenders of whose time much is what any run costs once; None where the run has too few steps to know."""
    found = [
        name
        for name, one in results.get("contenders", {}).items()
        if "once_share" in one and (one["once_share"] is None or one["once_share"] > MOST_ONCE)
    ]
    if not found:
        return []
    words = "too few steps to tell the time of one: what a run costs once is more than a tenth of it"
    return [("note", f"{words} (of {', '.join(found)}); pass more --steps or --epochs")]


def _of_sizes(results: dict[str, Any]) -> list[Remark]:
    left_out = (results.get("sizes") or {}).get("left_out", {})
    failed = (results.get("sizes") or {}).get("failed", {})
    said = [f"Hidden size {size} was not timed: {reason}" for size, reason in left_out.items()]
    said += [
        f"{name} failed at hidden size {size}: {reason}"
        for name, by_size in failed.items()
        for size, reason in by_size.items()
    ]
    return [("bad", words) for words in said]


def absences(results: dict[str, Any]) -> list[str]:
    """Who took no part, and why; at hidden sizes where they took part otherwise, or for another reason."""
    everywhere = results.get("absent", {})
    said = [f"{name} ({reason})" for name, reason in everywhere.items()]
    for name, by_size in (results.get("sizes") or {}).get("absent", {}).items():
        for reason in dict.fromkeys(by_size.values()):
            if everywhere.get(name) != reason:
                where = [size for size, found in by_size.items() if found == reason]
                said.append(f"{name} at hidden size {', '.join(where)} ({reason})")
    return said


def _not_run(results: dict[str, Any]) -> list[Remark]:
    missing = not_run(results)
    return [("note", f"Not run: {abbreviate_list(missing)}")] if missing else []


def not_run(results: dict[str, Any]) -> list[str]:
    """Of what was planned: benchmark cases, or contenders by seed and hidden sizes."""
    if results.get("finished", True):
        return []
    planned = results.get("planned", {})
    if isinstance(planned, list):
        done = {*(case["name"] for case in results["cases"]), *results.get("left_out", ())}
        return [name for name in planned if name not in done]
    ended = {*results.get("absent", ()), *results.get("failed", ())}
    done = results.get("trained", [])
    left = [
        f"{name} (seed {seed})"
        for seed in planned.get("seeds", [])
        for name in planned.get("contenders", [])
        if name not in ended and [name, seed] not in done
    ]
    sizes = results.get("sizes") or {}
    timed = [*sizes.get("hidden", []), *map(int, sizes.get("left_out", {}))]
    return left + [f"hidden size {size}" for size in planned.get("sizes", []) if size not in timed]
