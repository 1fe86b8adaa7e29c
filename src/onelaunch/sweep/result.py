"""What a sweep returns: the table of its candidates, the best of them, and the history of every member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from torch import nn

from onelaunch.errors import OnelaunchError, require_integer, require_path
from onelaunch.html_page import write_page
from onelaunch.sweep.member import Member, Record
from onelaunch.sweep.ranking import Row, rank
from onelaunch.sweep.table import Table, with_parameters
from onelaunch.train.history import History


class MissingMemberError(OnelaunchError, IndexError):
    """The number of a member that the sweep does not have."""


def _number_of(index: object, count: int) -> int:
    """The number of a member of a sweep that has `count`; a negative index counts from the end."""
    number = require_integer("index", index, "the number of a member")
    if not -count <= number < count:
        raise MissingMemberError(f"member {number} is not there: the sweep has {count}, pass 0 to {count - 1}")
    return number % count


class Histories(Sequence[History]):
    """The History of each member, made from its record when it is asked for.

    After Ctrl-C, `histories[i]` raises OnelaunchError for a member that has not finished. A loop and a slice have an empty
    History in its place, as for a member that failed before its first step, so that each stays beside its member.
    """

    def __init__(self, records: Mapping[int, Record], count: int) -> None:
        self._records, self._count = records, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> History: ...
    @overload
    def __getitem__(self, index: slice) -> list[History]: ...
    def __getitem__(self, index: int | slice) -> History | list[History]:
        if isinstance(index, slice):
            return [self._history(number) for number in range(*index.indices(self._count))]
        number = _number_of(index, self._count)
        if number not in self._records:
            raise OnelaunchError(f"member {number} has not finished: the sweep was stopped before")
        return self._history(number)

    def __iter__(self) -> Iterator[History]:
        return map(self._history, range(self._count))

    def _history(self, number: int) -> History:
        return self._records[number].history() if number in self._records else History()


@dataclass
class Sweep:
    """The result of `ol.sweep`. `members[i]` is a member's parameters, seed and split, and `histories[i]` its History."""

    members: Sequence[Member]
    records: Mapping[int, Record]  # of the finished members
    metric: str
    validates: bool
    plan: str  # for people: the engine of each group, and how many members it trained at once
    seconds: float
    interrupted: bool = False
    make_trained: Callable[[Member], nn.Module] = field(repr=False, default=lambda member: nn.Identity())
    _table: Table | None = field(repr=False, default=None)

    @property
    def table(self) -> Table:
        """The candidates with mean and standard deviation of the metric over seeds and splits, best first."""
        if self._table is None:
            rows = rank(self.members, self.records, self.metric)
            self._table = Table(rows, self.metric, self.validates, len(self.members), len(self.records))
        return self._table

    @property
    def histories(self) -> Histories:
        """`histories[i]`: the History of member i, as `fit` would have returned it. In a loop it is empty for a member that
        has not finished."""
        return Histories(self.records, len(self.members))

    @property
    def best(self) -> Row:
        """The best row of the table: `.parameters`, `.mean`, `.std`, `.members`. OnelaunchError if every member failed."""
        rows = self.table.rows
        if not rows or rows[0].best_member is None:
            reasons = f": {rows[0].failed[0]}" if rows and rows[0].failed else ""
            if self.records and not self.failures:
                reasons = f": metric={self.table.metric!r} is undefined on the validation rows, pass another"
            raise OnelaunchError(f"no member of the sweep has a result{reasons}")
        return rows[0]

    @property
    def best_model(self) -> nn.Module:
        """The trained network of the best row; of its seeds and splits, the one with the best metric."""
        found = self.best.best_member
        assert found is not None
        return self.model(found)

    def model(self, index: int) -> nn.Module:
        """The trained network of a finished member. If its weights were not kept, it is trained again, to the same bits on
        the CPU. Raises OnelaunchError for a member that failed or has not finished."""
        number = _number_of(index, len(self.members))
        if number not in self.records:
            raise OnelaunchError(f"member {number} has no result: pass the number of a finished member")
        if reason := self.records[number].error:
            raise OnelaunchError(f"member {number} ({self.members[number]}) failed: {reason}")
        return self.make_trained(self.members[number])

    @property
    def failures(self) -> dict[int, str]:
        """Why members have no result, by their number."""
        return {index: record.error for index, record in sorted(self.records.items()) if record.error}

    def to_pandas(self, *, members: bool = False) -> Any:
        """The table as a pandas DataFrame, one row per candidate; with members=True, one row per member.

        A parameter that is named like a column of results, such as `steps`, has the prefix `param_`.
        """
        try:
            import pandas
        except ImportError as error:
            raise OnelaunchError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(self._member_dicts() if members else self.table.to_dicts())

    def _member_dicts(self) -> list[dict[str, Any]]:
        finished = [member for member in self.members if member.index in self.records]
        results = [
            {
                "member": member.index, "seed": member.seed, "split": member.split,
                self.metric: self.records[member.index].value(self.metric), "steps": self.records[member.index].steps,
                "error": self.records[member.index].error,
            }
            for member in finished
        ]  # fmt: skip
        rows = with_parameters([member.parameters for member in finished], results)
        return [{"member": row["member"], **row} for row in rows]

    def plot(self, path: str | Path) -> Path:
        """Draw the metric over each parameter, and the curves of the best candidates; .png, .svg or .pdf by the suffix."""
        from onelaunch.sweep.draw import draw_sweep

        return draw_sweep(self.table, self.records, require_path("path", path))

    def html(self, path: str | Path) -> Path:
        """Write one page that needs no other file: parallel coordinates, the metric over each parameter, curves of the best."""
        from onelaunch.sweep.page import page

        about = {"members": len(self.members), "seconds": self.seconds, "plan": self.plan}
        return write_page(page(self.table, self.records, about), require_path("path", path))

    def __repr__(self) -> str:
        table = self.table
        best = f", best {table.heading} {table.format_value(table.rows[0].mean)}" if len(table) else ""
        stopped = ", interrupted" if self.interrupted else ""
        return f"<Sweep: {len(self.records)} of {len(self.members)} members in {self.seconds:.3g} s{best}{stopped}>"
