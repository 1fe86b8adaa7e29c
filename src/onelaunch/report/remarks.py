"""Remarks on a comparison besides its figures: what failed, diverged, was too short to time, or was not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onelaunch.bench.case import OURS
from onelaunch.errors import abbreviate_list

MAX_LOSS_RATIO = 2.0  # of two final losses
MIN_LOSS = 1e-3  # of the first loss: smaller final losses count as zero
MAX_ONCE_SHARE = 0.1  # of a run's time: with a larger one-time cost the time per step says little

Remark = tuple[str, str]  # "bad" or "note", and the words


def is_ours(name: str) -> bool:
    return name.startswith(OURS)


def remarks(results: dict[str, Any]) -> list[Remark]:
    """All remarks, for the terminal and the page alike. Files of older versions hold less, and get fewer remarks."""
    parts = (_failed, _diverged, _different_losses, _too_short, _sizes, _not_run)
    return [remark for part in parts for remark in part(results)]


def is_red(results: dict[str, Any]) -> bool:
    """Whether an engine of ours failed, disagrees with PyTorch, or diverged where PyTorch did not or the other way round; or a
    hidden size could not be timed."""
    sizes = results.get("sizes") or {}
    contenders = results.get("contenders", {})
    reference = next((one.get("diverged_step") for one in contenders.values()), None)
    return bool(
        results.get("failed") or sizes.get("left_out") or sizes.get("failed") or _different_losses(results)
    ) or any(
        is_ours(name)
        and (bool(one["gap"] and not one["gap"]["agrees"]) or (one.get("diverged_step") is None) != (reference is None))
        for name, one in contenders.items()
    )


def _failed(results: dict[str, Any]) -> list[Remark]:
    return [("bad", f"{name} failed: {reason}") for name, reason in results.get("failed", {}).items()]


def _diverged(results: dict[str, Any]) -> list[Remark]:
    """The contenders that diverged, with the step; and those that did not, where PyTorch did."""
    contenders = results.get("contenders", {})
    steps = {name: one["diverged_step"] for name, one in contenders.items() if one.get("diverged_step") is not None}
    steps |= results.get("diverged", {})  # engines of ours stop when they diverge, and are not among the contenders
    if not steps:
        return []
    if len(set(steps.values())) == 1:
        where = f"at step {next(iter(steps.values())):,}"
    else:
        where = ", ".join(f"{name} at step {step:,}" for name, step in steps.items())
    both = {1: "", 2: "both "}.get(len(steps), "all ")
    statements = [
        ("bad", f"{_joined(list(steps))} {both}diverged ({where}): the loss is no longer finite; pass a smaller lr")
    ]
    reference = next(iter(contenders), "")
    if reference in steps and (others := [name for name in contenders if name not in steps]):
        statements.append(("bad", f"{_joined(others)} did not diverge as {reference} did"))
    return statements


def _different_losses(results: dict[str, Any]) -> list[Remark]:
    """Engines of ours whose trained weights have a different loss than PyTorch's, whatever their curves say."""
    found = []
    contenders = results.get("contenders", {})
    ends = {name: ((one.get("final") or {}).get("loss") or {}).get("mean") for name, one in contenders.items()}
    reference, expected = next(iter(ends.items()), ("", None))
    for name, loss in ends.items():
        if is_ours(name) and loss and expected:
            least, most = sorted((abs(loss), abs(expected)))
            begin = next((abs(value) for value in contenders[name]["curve"]["mean"] if value), 0.0)
            if most > MAX_LOSS_RATIO * least and most > MIN_LOSS * begin:
                words = f"{name} ends with a loss of {loss:.3g} where {reference} has {expected:.3g}"
                found.append(("bad", f"{words}: its weights are not those of its curve"))
    return found


def _joined(names: Sequence[str]) -> str:
    """`a, b and c`"""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def _too_short(results: dict[str, Any]) -> list[Remark]:
    """A remark on contenders whose time per step is mostly one-time cost, or whose run has too few steps to know."""
    found = [
        name
        for name, one in results.get("contenders", {}).items()
        if "once_share" in one and (one["once_share"] is None or one["once_share"] > MAX_ONCE_SHARE)
    ]
    if not found:
        return []
    words = "too few steps to time one: the one-time cost of a run is more than a tenth of its time"
    return [("note", f"{words} (of {', '.join(found)}); pass more --steps or --epochs")]


def _sizes(results: dict[str, Any]) -> list[Remark]:
    left_out = (results.get("sizes") or {}).get("left_out", {})
    failed = (results.get("sizes") or {}).get("failed", {})
    statements = [f"Hidden size {size} was not timed: {reason}" for size, reason in left_out.items()]
    statements += [
        f"{name} failed at hidden size {size}: {reason}"
        for name, by_size in failed.items()
        for size, reason in by_size.items()
    ]
    return [("bad", words) for words in statements]


def absences(results: dict[str, Any]) -> list[str]:
    """Absent contenders with the reason; those of hidden sizes where they are absent only there, or for another reason."""
    everywhere = results.get("absent", {})
    statements = [f"{name} ({reason})" for name, reason in everywhere.items()]
    for name, by_size in (results.get("sizes") or {}).get("absent", {}).items():
        for reason in dict.fromkeys(by_size.values()):
            if everywhere.get(name) != reason:
                where = [size for size, found in by_size.items() if found == reason]
                statements.append(f"{name} at hidden size {', '.join(where)} ({reason})")
    return statements


def _not_run(results: dict[str, Any]) -> list[Remark]:
    missing = not_run(results)
    return [("note", f"Not run: {abbreviate_list(missing)}")] if missing else []


def not_run(results: dict[str, Any]) -> list[str]:
    """What was planned and not run: benchmark cases, or contenders by seed and hidden sizes."""
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
