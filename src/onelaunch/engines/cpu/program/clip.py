"""Commands that clip the gradient by its global norm: two phases after the backward pass. Both split every matrix by its
input rows."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.engines.cpu.code.clip import CLIPPED_UPDATE, SQUARES
from onelaunch.engines.cpu.code.kernel import Address, Command, Unit
from onelaunch.engines.cpu.plan.division import Panel
from onelaunch.engines.cpu.plan.rows import split
from onelaunch.engines.cpu.program.work import Work, of_one_width
from onelaunch.integers import round_up


def parts(work: Work) -> Iterator[tuple[Address, list[Panel], int, int, int]]:
    """(address, panels, floats between panels, rows, columns in use) of the part of every parameter that this partition
    updates."""
    plan = work.plan
    for parameter in plan.parameters:
        rows = max(1, parameter.inputs)
        first, last = (0, rows) if work.private else split(rows, plan.partitions, work.partition)
        if not parameter.trained or first == last:
            continue
        panels = plan.panels_of(round_up(parameter.outputs, plan.lanes))
        whole = [panel for panel in panels if panel.first + panel.width <= parameter.outputs]
        rest = panels[len(whole) :]
        for run in [*of_one_width(whole), *([rest] if rest else [])]:
            column, width = run[0]
            start = Address(parameter.buffer) + (column * rows + first * width)
            yield start, run, width * rows, last - first, min(width, parameter.outputs - column)


def norm(work: Work) -> list[Command]:
    """The sum of the squares of this partition's part of the gradient, in double precision."""
    shift, unit = work.plan.gradient_shift(work.partition) // 4, Unit("clip", (work.rule,))
    return [
        SQUARES.command(
            unit, gradient=start + shift, panels=len(run), panel=stride, rows=rows, width=run[0].width, used=used,
            total=Address(f"squares.{work.partition}"), fresh=int(number == 0),
        )
        for number, (start, run, stride, rows, used) in enumerate(parts(work))
    ]  # fmt: skip


def update(work: Work) -> list[Command]:
    """Apply the optimizer to this partition's part of the clipped gradient."""
    totals = tuple(Address(f"squares.{partition}") for partition in range(work.plan.partitions))
    return [
        CLIPPED_UPDATE.command(
            Unit("clip", (work.rule,)), parameters=start, panels=len(run), panel=stride, count=rows * run[0].width,
            totals=totals, partitions=len(totals), state_stride=work.plan.state_stride, hyper=work.hyper,
        )
        for start, run, stride, rows, _ in parts(work)
    ]  # fmt: skip
