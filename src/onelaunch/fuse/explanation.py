"""What level 2 does to a model at given sizes: every operation, who runs it, what that saves, and the totals."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from onelaunch.errors import require_path
from onelaunch.format import format_bytes, format_seconds
from onelaunch.roofline import Cost, DeviceModel

WITHOUT_WHERE = 110  # below so many characters the table has no column "where"
WIDTH = 150  # of the table, in characters, where it is not printed to a terminal: it has no word broken then
MIN_WIDTH = 80  # also in a narrower terminal
OURS, INDUCTOR, LIBRARY = "onelaunch", "Inductor", "library"


@dataclass(frozen=True)
class Operation:
    """One operation of the model by itself."""

    name: str
    where: str  # path of its module
    cost: Cost
    seconds: float  # predicted
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[int, ...]  # indices of the operations whose values it reads


@dataclass(frozen=True)
class Group:
    """Operations that run as one: a kernel of ours, a kernel of Inductor's, or a call of a library."""

    name: str
    runs: str  # OURS, INDUCTOR or LIBRARY
    operations: tuple[int, ...]  # indices into Explanation.operations
    where: str
    reason: str
    before: Cost  # each operation by itself
    after: Cost
    dtype: torch.dtype
    predicted: tuple[float, float]  # seconds before and after
    measured: float | None = None  # seconds after, on the device

    @property
    def fused(self) -> bool:
        return len(self.operations) > 1 or self.runs == OURS


@dataclass(frozen=True)
class Totals(Cost):
    seconds: float = 0.0  # predicted


@dataclass(repr=False)
class Explanation:
    """What `explain` returns: every operation of a model, and the groups in which they run. `print` shows it as a table."""

    model: str  # the name of its class
    training: bool  # whether the model was in training mode
    device: DeviceModel  # the device that times are predicted for
    operations: list[Operation]  # each by itself, in the order of the captured graph
    groups: list[Group]  # operations that run as one kernel or library call
    notes: list[str] = field(default_factory=list)  # what else a reader should know, such as graph breaks
    imagined: bool = False  # the inputs are on a CPU, and nobody named the device
    measured: dict[str, float] = field(default_factory=dict)  # seconds per call of each candidate, on CUDA
    read: bool = False  # whether the kernels are read from what Inductor generated, or predicted

    @property
    def before(self) -> Totals:
        """Every operation by itself: bytes, FLOPs, launches and predicted seconds."""
        return self._totals([(group.before, group.predicted[0]) for group in self.groups])

    @property
    def after(self) -> Totals:
        """As it runs: bytes, FLOPs, launches and predicted seconds of all groups."""
        return self._totals([(group.after, group.predicted[1]) for group in self.groups])

    def _totals(self, parts: list[tuple[Cost, float]]) -> Totals:
        cost = sum((cost for cost, _ in parts), Cost())
        return Totals(cost.bytes, cost.flops, cost.launches, sum(seconds for _, seconds in parts))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings, ready for JSON."""
        return {
            "model": self.model, "mode": "training" if self.training else "evaluation",
            "device": asdict(self.device), "before": asdict(self.before), "after": asdict(self.after),
            "measured": dict(self.measured), "read": self.read, "groups": [self._group(group) for group in self.groups],
            "operations": [self._operation(operation) for operation in self.operations], "notes": list(self.notes),
            "rows": [[self.groups.index(group), count] for count, group in self.rows()],
        }  # fmt: skip

    def _group(self, group: Group) -> dict[str, Any]:
        return {
            "name": group.name, "runs": group.runs, "where": group.where, "operations": list(group.operations),
            "fused": group.fused, "reason": group.reason, "bytes": [group.before.bytes, group.after.bytes],
            "launches": [group.before.launches, group.after.launches], "flops": group.after.flops,
            "intensity": [group.before.intensity, group.after.intensity],
            "bound": self.device.bound(group.after, group.dtype), "predicted_seconds": list(group.predicted),
            "measured_seconds": group.measured,
        }  # fmt: skip

    def _operation(self, operation: Operation) -> dict[str, Any]:
        cost = operation.cost
        return {
            "name": operation.name, "label": operation.where, "dtype": str(operation.dtype).removeprefix("torch."),
            "shape": list(operation.shape), "bytes": cost.bytes, "flops": cost.flops, "launches": cost.launches,
            "intensity": cost.intensity, "bound": self.device.bound(cost, operation.dtype),
            "seconds": operation.seconds, "sources": list(operation.sources),
        }  # fmt: skip

    def html(self, path: str | Path) -> Path:
        """Write an interactive page that needs no network; its path."""
        from onelaunch.html_page import fill_page, write_page

        return write_page(fill_page("onelaunch.fuse", self.to_dict(), self.model), require_path("path", path))

    def rows(self) -> Iterator[tuple[int, Group]]:
        """Groups in order, equal ones together: how many there are, and the first of them.

        Groups are equal if they differ in nothing but the layer numbers of their module paths.
        """
        counts: dict[Any, list[Group]] = {}
        for group in self.groups:
            key = (group.name, group.runs, group.reason, group.after, _without_numbers(group.where))
            counts.setdefault(key, []).append(group)
        for alike in counts.values():
            yield len(alike), alike[0]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield self._table(narrow=options.max_width < WITHOUT_WHERE)

    def _table(self, *, narrow: bool) -> Any:
        """`narrow`: without the column that says where in the model the operations are."""
        from rich.table import Table

        mode = "training" if self.training else "evaluation"
        where = f"as on an {self.device.name} (the inputs are on a CPU)" if self.imagined else self.device.name
        title = f"{self.model}, {mode}, {where}: kernels {'as generated' if self.read else 'predicted'}"
        timed = any(group.measured is not None for group in self.groups)
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in ("operations", *([] if narrow else ["where"]), "runs as"):
            table.add_column(name, overflow="fold")
        for name in ("bytes", "launches", "predicted", *(["measured"] if timed else [])):
            table.add_column(name, justify="right", no_wrap=True)
        for count, group in self.rows():
            many = f" × {count}" if count > 1 else ""
            table.add_row(
                group.name + many, *([] if narrow else [_without_numbers(group.where) if count > 1 else group.where]),
                f"{group.runs}: {group.reason}" if group.reason else group.runs,
                _change(group.before.bytes, group.after.bytes, format_bytes),
                _change(group.before.launches, group.after.launches, lambda n: str(int(n))),
                _change(*group.predicted, format_seconds), *([_time(group.measured)] if timed else []),
            )  # fmt: skip
        before, after = self.before, self.after
        table.add_section()
        table.add_row(
            f"{len(self.operations)} operation{'s' * (len(self.operations) != 1)}", *([] if narrow else [""]),
            f"{sum(group.runs == OURS for group in self.groups)} by onelaunch",
            _change(before.bytes, after.bytes, format_bytes),
            _change(before.launches, after.launches, lambda n: str(int(n))),
            _change(before.seconds, after.seconds, format_seconds),
            *([_time(sum(group.measured or 0.0 for group in self.groups))] if timed else []),
        )  # fmt: skip
        said = ", ".join(f"{name} {format_seconds(value)}" for name, value in self.measured.items())
        several = any(count > 1 for count, _ in self.rows())
        lines = [*(["figures of a row with × n are for one of them"] if several else []), *self.notes]
        table.caption = "\n".join([*([f"measured per call: {said}"] if said else []), *lines])
        table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        width = max(shutil.get_terminal_size((WIDTH, 24)).columns, MIN_WIDTH)
        Console(file=text, width=width).print(self)
        return text.getvalue().rstrip("\n")

    __repr__ = __str__


def _without_numbers(where: str) -> str:
    """`encoder.layer.3.output` as `encoder.layer.*.output`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", where)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _change(before: float, after: float, text: Any) -> str:
    return text(after) if before == after else f"{text(before)} → {text(after)}"
