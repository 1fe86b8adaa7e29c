"""The rows of a sweep's table: one per candidate, with mean and standard deviation over its seeds and splits, best first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelaunch.run.metric_names import is_loss
from onelaunch.sweep.member import Member, Record


@dataclass(frozen=True)
class Row:
    """A candidate and what it came to. `members`: the numbers of its finished members."""

    parameters: dict[str, Any]
    mean: float  # of the sweep's metric over the members; NaN if all of them failed
    std: float
    members: tuple[int, ...]  # in order of their values, best first
    values: tuple[float, ...]
    failed: tuple[str, ...]  # why members have no result
    part: int  # steps of the longest-trained member: successive halving stops candidates early
    complete: bool  # whether its members trained to their ends

    @property
    def best_member(self) -> int | None:
        """The number of the member with the best value; None if all failed."""
        return None if math.isnan(self.mean) else self.members[0]


def rank(members: Sequence[Member], records: Mapping[int, Record], metric: str) -> list[Row]:
    """Rows of the candidates that have a finished member, best first.

    Candidates that trained to their end come before those that successive halving stopped, and candidates without a failed
    member before the others. Ties keep the order of the candidates. A row's members are in order of their metric, best first.
    """
    sign = 1.0 if is_loss(metric) else -1.0
    by_candidate: dict[int, list[Member]] = {}
    for member in members:
        if member.index in records:
            by_candidate.setdefault(member.candidate, []).append(member)
    rows = []
    for found in by_candidate.values():
        values = {member.index: records[member.index].value(metric) for member in found}
        ordered = sorted(values, key=lambda index: (math.isnan(values[index]), sign * values[index], index))
        # Sorted, so that the sums do not depend on the order of the grid.
        good = np.array(sorted(value for value in values.values() if not math.isnan(value)))
        rows.append(Row(
            found[0].parameters, float(good.mean()) if len(good) else math.nan, float(good.std()) if len(good) else math.nan,
            tuple(ordered), tuple(values[index] for index in ordered),
            tuple(records[index].error for index in ordered if records[index].error),
            max(records[index].steps for index in ordered), all(records[index].finished for index in ordered),
        ))  # fmt: skip

    def key(row: Row) -> tuple[Any, ...]:
        hopeless = math.isnan(row.mean)
        part = 0 if row.complete else -row.part
        return hopeless, not row.complete, part, bool(row.failed), 0.0 if hopeless else sign * row.mean

    return sorted(rows, key=key)
