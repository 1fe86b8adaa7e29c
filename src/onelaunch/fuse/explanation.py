"""What fusing does to a model at given sizes: each chain with its decision, each operation with its traffic, the totals."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from onelaunch.errors import ArgumentTypeError
from onelaunch.format import format_bytes, format_si
from onelaunch.format import format_seconds as duration
from onelaunch.fuse.costs import Work
from onelaunch.fuse.resources import KernelResources
from onelaunch.fuse.roofline import DeviceModel

LEAST_WIDTH = 150  # of the table, in characters, where nobody says how wide the terminal is
LEAST_TABLE = 76  # where even the narrow table would have columns of no width: a block of lines a chain instead
MOST_NOTES = 6  # below the table


@dataclass(frozen=True)
class Group:
    """A chain: what its operations cost apart and fused. Where it is not fused, both are what they cost apart."""

    name: str
    operations: tuple[int, ...]  # indices into Explanation.operations
    labels: tuple[str, ...]
    fused: bool
    reason: str
    before: Work
    after: Work
    dtype: torch.dtype
    predicted: tuple[float, float] | None = None  # seconds apart and fused
    measured: tuple[float, float] | None = None
    memory: tuple[float, float] | None = None  # bytes at the fullest moment apart and fused, beside inputs and results
    kernels: tuple[KernelResources, ...] = ()


@dataclass(frozen=True)
class OperationCost:
    name: str
    label: str
    work: Work
    seconds: float  # predicted
    dtype: torch.dtype
    shape: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Totals:
    bytes: float
    flops: float
    launches: int
    seconds: float  # predicted


@dataclass(repr=False)
class Explanation:
    model: str
    training: bool
    device: DeviceModel
    operations: list[OperationCost]
    groups: list[Group]
    notes: list[str] = field(default_factory=list)

    @property
    def before(self) -> Totals:
        return self._totals(fused=False)

    @property
    def after(self) -> Totals:
        return self._totals(fused=True)

    def _totals(self, fused: bool) -> Totals:
        groups = [group for group in self.groups if group.fused and fused]
        taken = {index for group in groups for index in group.operations}
        rest = [op for index, op in enumerate(self.operations) if index not in taken]
        costs = [group.after.total for group in groups] + [op.work.total for op in rest]
        seconds = sum(group.predicted[1] for group in groups if group.predicted) + sum(op.seconds for op in rest)
        return Totals(
            sum(cost.bytes for cost in costs),
            sum(cost.flops for cost in costs),
            sum(cost.launches for cost in costs),
            seconds,
        )

    @property
    def mode(self) -> str:
        return "training: forward and backward" if self.training else "evaluation: forward"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and strings, ready for JSON."""
        return {
            "model": self.model,
            "mode": "training" if self.training else "evaluation",
            "device": asdict(self.device),
            "before": asdict(self.before),
            "after": asdict(self.after),
            "groups": [self._group(group) for group in self.groups],
            "operations": [self._operation(operation) for operation in self.operations],
            "notes": list(self.notes),
        }

    def _group(self, group: Group) -> dict[str, Any]:
        cost = group.after.total
        return {
            "name": group.name,
            "labels": list(group.labels),
            "where": place(group.labels),
            "operations": list(group.operations),
            "fused": group.fused,
            "reason": group.reason,
            "bytes": [group.before.total.bytes, cost.bytes],
            "launches": [group.before.total.launches, cost.launches],
            "flops": cost.flops,
            "intensity": [group.before.total.intensity, cost.intensity],
            "bound": self.device.bound(cost, group.dtype),
            "predicted_seconds": list(group.predicted) if group.predicted else None,
            "measured_seconds": list(group.measured) if group.measured else None,
            "memory": list(group.memory) if group.memory else None,
            "kernels": [asdict(kernel) for kernel in group.kernels],
        }

    def _operation(self, operation: OperationCost) -> dict[str, Any]:
        cost = operation.work.total
        return {
            "name": operation.name,
            "label": operation.label,
            "bytes": cost.bytes,
            "flops": cost.flops,
            "launches": cost.launches,
            "intensity": cost.intensity,
            "bound": self.device.bound(cost, operation.dtype),
            "seconds": operation.seconds,
            "shape": list(operation.shape),
            "dtype": str(operation.dtype).removeprefix("torch."),
            "sources": list(operation.sources),
        }

    def html(self, path: str | Path) -> Path:
        """Write one page that needs nothing else: the model before and after, and a roofline."""
        from onelaunch.fuse.page import write_page

        if not isinstance(path, (str, Path)):
            raise ArgumentTypeError(f"path is a {type(path).__name__}: pass a file name such as page.html")
        return write_page(self.to_dict(), Path(path))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        # In less room rich would shrink the first columns to nothing, and they are the answer.
        narrow = options.max_width < LEAST_WIDTH
        if options.max_width < LEAST_TABLE:
            yield from self._blocks()
        else:
            yield self._table(narrow)
        if narrow:
            yield Text(f"FLOPs and bounds: in {LEAST_WIDTH} columns, as HTML or as JSON.", style="dim")
        if not self.groups:
            yield Text(
                "No chain of operations that can be one was found: fuse returns this model as it is.", style="yellow"
            )
        for note in self.notes[:MOST_NOTES]:
            yield Text(f"note: {note}", style="dim")
        if len(self.notes) > MOST_NOTES:
            yield Text(f"and {len(self.notes) - MOST_NOTES} more notes, in to_dict()", style="dim")

    @property
    def _title(self) -> str:
        return f"{self.model} ({self.mode}) on {self.device.name}"

    @property
    def _saved(self) -> str:
        return f"{sum(group.fused for group in self.groups)} of {len(self.groups)} chains fused"

    def _blocks(self) -> Iterator[Any]:
        """A chain after the other, a line for each figure."""
        from rich.text import Text

        yield Text(self._title, style="bold")
        for group in self.groups:
            cost = group.after.total
            yield Text.assemble("\n", (group.name, "bold"), "\n", (place(group.labels), "dim"), "\n", _decision(group))
            yield Text(f"bytes: {_change(group.before.total.bytes, cost.bytes, format_bytes)}")
            yield Text(f"launches: {_change(group.before.total.launches, cost.launches, str)}")
            for name, pair in (("predicted", group.predicted), ("measured", group.measured)):
                if pair:
                    yield Text(f"{name}: {_change(*pair, duration)}")
        before, after = self.before, self.after
        yield Text(f"\nthe whole model: {self._saved}", style="bold")
        yield Text(f"bytes: {_change(before.bytes, after.bytes, format_bytes)}")
        yield Text(f"launches: {_change(before.launches, after.launches, str)}")
        yield Text(f"predicted: {_change(before.seconds, after.seconds, duration)}")

    def _table(self, narrow: bool) -> Any:
        from rich.table import Table
        from rich.text import Text

        before, after = self.before, self.after
        measured = any(group.measured for group in self.groups)
        table = Table(title=self._title, title_justify="left", title_style="bold")
        for column in ("operations, decision",) if narrow else ("operations", "decision and reason"):
            table.add_column(column, overflow="fold", ratio=None if column == "operations" else 1)
        times = ("measured",) if narrow and measured else ("predicted", "measured") if measured else ("predicted",)
        for column in ("bytes", "launches", *(() if narrow else ("FLOPs", "FLOPs/byte", "bound by")), *times):
            table.add_column(column, justify="right", no_wrap=True)
        if measured and not narrow:
            table.add_column("registers, shared, spills, occupancy", overflow="fold")
        for group in self.groups:
            cost = group.after.total
            name = Text.assemble((group.name, "bold"), "\n", (place(group.labels), "dim"))
            decision = _decision(group)
            row: list[Any] = [Text("\n").join([name, decision])] if narrow else [name, decision]
            row.append(_change(group.before.total.bytes, cost.bytes, format_bytes))
            row.append(_change(group.before.total.launches, cost.launches, str))
            if not narrow:
                row += [format_si(cost.flops, ""), f"{cost.intensity:.3g}", self.device.bound(cost, group.dtype)]
            known = {"predicted": group.predicted, "measured": group.measured}
            row += [_change(*pair, duration) if (pair := known[column]) else "" for column in times]
            if measured and not narrow:
                row.append("\n".join(map(_kernel, group.kernels)))
            table.add_row(*row)
        table.add_section()
        row = [f"the whole model: {self._saved}"] if narrow else ["the whole model", self._saved]
        row += [_change(before.bytes, after.bytes, format_bytes), _change(before.launches, after.launches, str)]
        row += [] if narrow else [format_si(after.flops, ""), "", ""]
        row += [_change(before.seconds, after.seconds, duration) if column == "predicted" else "" for column in times]
        table.add_row(*row, style="bold")
        return table

    def __repr__(self) -> str:  # what a prompt shows
        return str(self)

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((LEAST_WIDTH, 0)).columns
        console = Console(file=io.StringIO(), width=width)
        console.print(self)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip("\n")


def place(labels: tuple[str, ...]) -> str:
    """`encoder.0: dense, dropout` for paths that begin alike."""
    paths = [label.split(".") for label in labels]
    same = 0
    while all(len(path) > same + 1 and path[same] == paths[0][same] for path in paths):
        same += 1
    rest = ", ".join(".".join(path[same:]) for path in paths)
    return f"{'.'.join(paths[0][:same])}: {rest}" if same else rest


def _decision(group: Group) -> Any:
    from rich.text import Text

    verdict = ("fused", "green") if group.fused else ("not fused", "yellow")
    return Text.assemble(verdict, f": {group.reason}")


def _kernel(kernel: KernelResources) -> str:
    return (
        f"{kernel.name}: {kernel.registers}, {format_bytes(kernel.shared_bytes)}, {kernel.spills}, {kernel.occupancy:.0%}"
    )  # fmt: skip


def _change(before: float, after: float, show: Any) -> str:
    return show(before) if before == after else f"{show(before)} → {show(after)}"
