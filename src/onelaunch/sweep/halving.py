"""Successive halving: all candidates train a part of their epochs, the best third goes on to three times as many, and so on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onelaunch.run.metric_names import is_loss
from onelaunch.sweep.member import Member, Record

KEEP_ONE_IN = 3


def parts_of(candidates: int, epochs: int) -> list[float]:
    """The part of its epochs that a candidate trains up to each rung; the last is 1."""
    rungs = min(_whole_log(candidates), _whole_log(epochs))
    return [KEEP_ONE_IN ** float(number - rungs) for number in range(rungs + 1)]


def _whole_log(value: int) -> int:
    found = 0
    while KEEP_ONE_IN ** (found + 1) <= value:
        found += 1
    return found


def survivors(
    candidates: Iterable[int], members: Sequence[Member], records: Mapping[int, Record], metric: str, part: float
) -> list[int]:
    """The third of the candidates with the best mean after this part, at least one; those with a failed member come last.

    The result depends on the records alone, not on the order in which members finished.
    """
    sign = 1.0 if is_loss(metric) else -1.0
    values: dict[int, list[float]] = {candidate: [] for candidate in candidates}
    for member in members:
        if member.candidate in values and member.index in records:
            values[member.candidate].append(records[member.index].value_at(metric, part))

    def key(candidate: int) -> tuple[Any, ...]:
        found = np.array(sorted(values[candidate]))  # the sum must not depend on their order
        good = found[~np.isnan(found)]
        mean = sign * float(good.mean()) if len(good) else math.inf
        return len(good) == 0, len(good) < len(found), mean, candidate

    ordered = sorted(values, key=key)
    return sorted(ordered[: max(1, math.ceil(len(ordered) / KEEP_ONE_IN))])
