"""The table of a sweep, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onelaunch.format import format_percent
from onelaunch.sweep.ranking import Row

if TYPE_CHECKING:
    from rich.console import Group

SHOWN_ROWS = 20  # of a printed table


class Table:
    """The candidates, best first. Prints as a table of the best 20; `rows` has all."""

    def __init__(self, rows: Sequence[Row], metric: str, validates: bool, total: int, done: int) -> None:
        self.rows, self.metric, self.validates = tuple(rows), metric, validates
        self._total, self._done = total, done

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that the candidates have."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.parameters))

    @property
    def heading(self) -> str:
        return f"validation {self.metric}" if self.validates else f"training {self.metric}"

    def format_value(self, value: float) -> str:
        return format_percent(value, 2) if self.metric == "accuracy" else f"{value:.4g}"

    def _score(self, row: Row) -> str:
        if row.mean != row.mean:
            return "failed" if row.failed else "undefined"
        value = self.format_value(row.mean)
        return value if len(row.members) - len(row.failed) < 2 else f"{value} ± {self.format_value(row.std)}"

    def _note(self, row: Row) -> str:
        notes = [f"{len(row.failed)} of {len(row.members)} failed"] if row.failed else []
        return ", ".join([*notes, *([] if row.complete else [f"stopped after {row.part:,} steps"])])

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        unfinished = f", {self._done:,} of {self._total:,} members finished" if self._done < self._total else ""
        plural = "" if len(self.rows) == 1 else "s"
        table = RichTable()
        has_notes = any(self._note(row) for row in self.rows[:SHOWN_ROWS])
        for name in ("", *self.names):
            table.add_column(Text(name), justify="right")  # as Text: a name may look like rich's markup
        table.add_column(Text(self.heading), justify="right")
        table.add_column("members", justify="right")
        if has_notes:
            table.add_column("note")
        for number, row in enumerate(self.rows[:SHOWN_ROWS], 1):
            cells = [Text(_short(row.parameters.get(name, ""))) for name in self.names]
            notes = [self._note(row)] if has_notes else []
            table.add_row(str(number), *cells, self._score(row), str(len(row.members)), *notes)
        more = len(self.rows) - SHOWN_ROWS
        below = [f"and {more:,} more"] if more > 0 else []
        return Group(f"{len(self.rows):,} candidate{plural}{unfinished}", table, *below)

    def __str__(self) -> str:
        import io

        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    __repr__ = __str__

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict per row: the parameters, then `mean`, `std`, `members`, `failed`, `steps` and `complete`.

        A parameter of one of these names is called `param_mean`, ….
        """
        return with_parameters(
            [row.parameters for row in self.rows],
            [
                {
                    "mean": row.mean, "std": row.std, "members": len(row.members), "failed": len(row.failed),
                    "steps": row.part, "complete": row.complete,
                }
                for row in self.rows
            ],
        )  # fmt: skip


def with_parameters(parameters: Sequence[Mapping[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parameters of each row before its results. A parameter that is named like a result has the prefix `param_`."""
    own = {name for row in results for name in row}
    columns = {name: name for row in parameters for name in row if name not in own}
    taken = own | columns.keys()
    for name in dict.fromkeys(name for row in parameters for name in row if name in own):
        column = f"param_{name}"
        while column in taken:
            column = f"param_{column}"
        taken.add(column)
        columns[name] = column
    return [
        {**{columns[name]: value for name, value in row.items()}, **result}
        for row, result in zip(parameters, results, strict=True)
    ]


def _short(value: Any) -> str:
    """A value for a printed table: numbers with four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
