"""From the gradient of a stage's output to the gradient of its product, in the two layouts that dW and dX read.

A block is `lanes` units by `lanes` rows. Its partial sums of dX are added and transposed in registers, multiplied by the
derivative of the stage's last group, stored into the panel, and transposed back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

from onelaunch.engines.cpu.code.elementwise import Group, Operations
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel

# How a gradient passes the last group of a stage: there is none, by the derivative that the forward stored, or by the output.
Through = Literal["nothing", "derivative", "output"]
# A command covers panels of one width and, of batch panels of one width, rows [first_block, last_block) of each;
# `first_unit` and `first_row` are those of the first panel.
BLOCKS = (
    "i64 panels, i64 width, i64 batch_panels, i64 batch_width, i64 first_unit, i64 first_row, ptr panel, ptr transposed, "
    "ptr saved, i64 padded, i64 all_rows, i64 pitch, i64 first_block, i64 last_block"
)


@functools.cache
def reduce_kernel(group: Group) -> Kernel:
    """`skip` has the gradient that reaches the stage's output through additions, in panels. `added` receives the gradient that
    an addition at the stage's end sends to its source."""
    operands = "list partials, i64 sources, i64 back, ptr skip, ptr added"
    return Kernel("reduce", f"{operands}, {BLOCKS}{', ' * bool(group.names)}{group.fields}")


@functools.cache
def transpose_kernel(group: Group) -> Kernel:
    return Kernel("transpose", f"{BLOCKS}{', ' * bool(group.names)}{group.fields}")


def emit_reduce(module: Module, group: Group, through: Through, skips: bool, sends: bool) -> None:
    """`reduce`: a stage's gradient from the partial sums of dX; with the field `back`, also in the transposed layout."""
    module.kernel(reduce_kernel(group), lambda f: _reduce(f, group, through, skips, sends))


def emit_transpose(module: Module, group: Group, through: Through) -> None:
    """`transpose`: the same for a gradient already in the panels, from the loss or a BatchNorm1d."""
    module.kernel(transpose_kernel(group), lambda f: _transpose(f, group, through))


def transpose(f: Function, rows: list[Value]) -> list[Value]:
    """The transpose of a `lanes` x `lanes` block: swap halves, then quarters, ... across pairs of rows."""
    distance = f.lanes // 2
    while distance:
        swapped = list(rows)
        low = [lane if not lane & distance else f.lanes + (lane ^ distance) for lane in range(f.lanes)]
        high = [lane | distance if not lane & distance else f.lanes + lane for lane in range(f.lanes)]
        for i in range(f.lanes):
            if not i & distance:
                for position, order in ((i, low), (i | distance, high)):
                    indices = ", ".join(f"i32 {lane}" for lane in order)
                    swapped[position] = f.op(
                        f.vector,
                        f"shufflevector {f.vector} {rows[i].text}, {f.vector} {rows[i | distance].text}, "
                        f"<{f.lanes} x i32> <{indices}>",
                        "swap",
                    )
        if distance == f.lanes // 4:
            # LLVM looks for one instruction in place of several shuffles; here it finds none, and the search takes long.
            swapped = [f.opaque_vector(row) for row in swapped]
        rows = swapped
        distance //= 2
    return rows


def _over_blocks(f: Function, block: Callable[[Value, Value, Value], None]) -> None:
    """Call `block(position in a transposed layout, position in the panels, position in the activations)` for every block."""

    def panel(number: Int) -> None:
        column = f.add(f.mul(number, f["width"]), f["first_unit"], "column")

        def half(inside: Int) -> None:
            unit = f.add(column, inside, "unit")

            def batch_panel(batch_number: Int) -> None:
                first = f.add(f.mul(batch_number, f["batch_width"]), f["first_row"], "first")
                start = f.add(f.mul(first, f["padded"]), f.mul(unit, f["batch_width"]))

                def rows(offset: Int) -> None:
                    row = f.add(first, offset, "row")
                    in_panel = f.add(f.mul(column, f["all_rows"]), f.add(f.mul(row, f["width"]), inside))
                    in_activations = f.add(f.mul(row, f["pitch"]), unit)
                    block(f.i64(f.add(start, offset)), f.i64(in_panel), f.i64(in_activations))

                f.loop(f["last_block"], rows, start=f["first_block"], step=f.lanes, index="block")

            f.loop(f["batch_panels"], batch_panel, index="batch_panel")

        f.loop(f["width"], half, step=f.lanes, index="half")

    f.loop(f["panels"], panel, index="panel")


class _Block:
    """Takes rows of a gradient through the last group, stores them into the panel and, transposed, for dX."""

    def __init__(self, f: Function, group: Group, through: Through) -> None:
        self.f, self.through = f, through
        self.operations = Operations(f, group)

    def rows(self, rows: list[Value], in_panel: Value, in_activations: Value) -> list[Value]:
        f = self.f
        done = []
        saved_at = f.rows(f.at(f["saved"], in_activations), f["pitch"], len(rows)) if self.through != "nothing" else []
        panel_at = f.rows(f.at(f["panel"], in_panel), f["width"], len(rows))
        for number, gradient in enumerate(rows):
            result = gradient
            if self.through != "nothing":
                saved = f.vload(saved_at[number], hint="saved")
                if self.through == "derivative":
                    result = f.fmul(gradient, saved)
                else:
                    result = self.operations.backward_from_output(gradient, saved)
            f.store(result, panel_at[number])
            done.append(result)
        return done

    def back(self, rows: list[Value], at: Value) -> None:
        f = self.f
        places = f.rows(f.at(f["transposed"], at), f["batch_width"], len(rows))
        for place, column in zip(places, transpose(f, rows), strict=True):
            f.store(column, place)


def _reduce(f: Function, group: Group, through: Through, skips: bool, sends: bool) -> None:
    work = _Block(f, group, through)

    def block(at: Value, in_panel: Value, in_activations: Value) -> None:
        def columns(source: Int) -> list[Value]:
            partial = f.at(f.load("ptr", f["partials"], source, element="i64", hint="partial"), at)
            return [f.vload(place, hint="partial") for place in f.rows(partial, f["batch_width"], f.lanes)]

        def add(source: Int, *totals: Value) -> list[Value]:
            return [f.fadd(total, more) for total, more in zip(totals, columns(source), strict=True)]

        totals = f.loop(f["sources"], add, start=1, carry=columns(0), index="source")
        rows = transpose(f, totals)
        if skips:
            skip = f.at(f["skip"], in_panel)
            rows = [f.fadd(row, f.vload(skip, f.mul(n, f["width"]), "skip")) for n, row in enumerate(rows)]
        if sends:
            for place, row in zip(f.rows(f.at(f["added"], in_panel), f["width"], f.lanes), rows, strict=True):
                f.store(row, place)
        done = work.rows(rows, in_panel, in_activations)
        f.when(f.compare("ne", f["back"], f.i64(0), "back"), lambda: work.back(done, at))

    _over_blocks(f, block)


def _transpose(f: Function, group: Group, through: Through) -> None:
    work = _Block(f, group, through)

    def block(at: Value, in_panel: Value, in_activations: Value) -> None:
        rows = [f.vload(place) for place in f.rows(f.at(f["panel"], in_panel), f["width"], f.lanes)]
        if through != "nothing":
            rows = work.rows(rows, in_panel, in_activations)
        work.back(rows, at)

    _over_blocks(f, block)


# A gradient in panels, from the head of a group that has no norm, or whose norm is done, through the group before it, in
# place. `added` receives the gradient that an addition at the head sends to its source; `skip` has what reaches the group
# before through additions, `before` its stored derivative.
THROUGH_GROUP = Kernel(
    "through_group",
    "ptr gradient, ptr added, ptr skip, ptr before, i64 panels, i64 panel, i64 rows, i64 width, i64 pitch",
)
Sends = Literal[
    "nothing", "first", "more"
]  # what an addition sends: if it is not the first of its source, it adds to it


def emit_through_group(module: Module, sends: Sends, skips: bool, has_before: bool) -> None:
    module.kernel(THROUGH_GROUP, lambda f: _through_group(f, sends, skips, has_before))


def _through_group(f: Function, sends: Sends, skips: bool, has_before: bool) -> None:
    def vector(start: Int, number: Int, row: Int, column: Int) -> None:
        place = f.add(start, f.add(f.mul(row, f["width"]), column))
        g = f.vload(f["gradient"], place, "gradient")
        if sends == "first":
            f.store(g, f["added"], place)
        elif sends == "more":
            f.store(f.fadd(g, f.vload(f["added"], place)), f["added"], place)
        if skips:
            g = f.fadd(g, f.vload(f["skip"], place, "skip"))
        if has_before:
            in_activations = f.add(f.add(f.mul(row, f["pitch"]), column), f.mul(number, f["width"]))
            g = f.fmul(g, f.vload(f["before"], in_activations))
        f.store(g, f["gradient"], place)

    def panel(number: Int) -> None:
        start = f.mul(number, f["panel"])

        def row(index: Int) -> None:
            f.loop(f["width"], lambda column: vector(start, number, index, column), step=f.lanes, index="column")

        f.loop(f["rows"], row, index="row")

    f.loop(f["panels"], panel, index="panel")


def position_in_panels(f: Function, row: Int, vector: Int) -> Int:
    """The position of a vector of a row in panels, which have two vectors each, the last one or two. The fields `vectors`
    and `all_rows` are the width and the height of all of them."""
    number = f.i64(vector)
    panel = f.op("i64", f"lshr i64 {number.text}, 1", "panel")
    half = f.op("i64", f"and i64 {number.text}, 1", "half")
    alone = f.compare("eq", f.i64(f.add(f.mul(panel, 2), 1)), f["vectors"], "alone")
    width = f.select(alone, f.i64(f.lanes), f.i64(2 * f.lanes), "width")
    start = f.mul(f.mul(panel, 2 * f.lanes), f["all_rows"])
    return f.add(start, f.add(f.mul(row, width), f.mul(half, f.lanes)))
