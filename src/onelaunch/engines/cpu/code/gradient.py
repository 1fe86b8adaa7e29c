"""From the gradient of a stage's output to the gradient of its product, in the two layouts that dW and dX read.

A block is `lanes` units by `lanes` rows. Its partial sums of dX are added and transposed in registers, multiplied by the
derivative of the stage's last group, stored into the panel, and transposed back.
"""

from __future__ import annotations

from onelaunch.engines.cpu.code import elementwise
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.optimizer import Update
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.stages import Stage


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
        rows = swapped
        distance //= 2
    return rows


def _through_last_group(f: Function, stage: Stage, gradient: Value, output: Value, pitch: int, row: int) -> Value:
    """`gradient` times the derivative of the stage's last group; `output` points at its output or its stored derivative."""
    number = len(stage.groups) - 1
    operations = stage.groups[number].operations
    if not operations:
        return gradient
    saved = f.vload(output, row * pitch, "saved")
    if stage.stores_derivative(number):
        return f.fmul(gradient, saved)
    return elementwise.backward_from_output(f, gradient, saved, operations)


def reduce_block(
    module: Module, plan: Plan, stage: Stage, *, sources: int, partial_width: int, panel_width: int, back: bool
) -> str:
    """`(partial0, ..., skip, saved, panel, transposed)`: one block of a stage's gradient from the partial sums of dX.

    `skip` has the gradient that reaches the stage's output through additions, if any.
    """
    name = f"reduce_{stage.index}_{sources}_partials_b{partial_width}_w{panel_width}" + "_back" * back
    parameters = "".join(f"ptr %partial{n}, " for n in range(sources))
    parameters += "ptr %skip, ptr %saved, ptr %panel, ptr %transposed"

    def make(f: Function) -> None:
        columns = []
        for unit in range(f.lanes):
            total = f.vload(f["partial0"], unit * partial_width, "partial")
            for n in range(1, sources):
                total = f.fadd(total, f.vload(f[f"partial{n}"], unit * partial_width, "partial"))
            columns.append(total)
        rows = transpose(f, columns)
        if stage.groups[-1].tapped:
            rows = [f.fadd(row, f.vload(f["skip"], n * panel_width, "skip")) for n, row in enumerate(rows)]
        _store_and_transpose(f, plan, stage, rows, panel_width, partial_width, back)

    return module.function(name, parameters, make)


def _store_and_transpose(
    f: Function, plan: Plan, stage: Stage, rows: list[Value], panel_width: int, batch_width: int, back: bool
) -> None:
    pitch = plan.pitch(stage)
    done = []
    for row, gradient in enumerate(rows):
        result = _through_last_group(f, stage, gradient, f["saved"], pitch, row)
        f.store(result, f["panel"], row * panel_width)
        done.append(result)
    if back:
        for unit, column in enumerate(transpose(f, done)):
            f.store(column, f["transposed"], unit * batch_width)


def transpose_block(
    module: Module, plan: Plan, stage: Stage, *, panel_width: int, batch_width: int, derive: bool
) -> str:
    """`(saved, panel, transposed)`: the same for a gradient already in the panel, from the loss or a BatchNorm1d."""
    name = f"transpose_{stage.index}_w{panel_width}_b{batch_width}" + "_derive" * derive

    def make(f: Function) -> None:
        rows = [f.vload(f["panel"], row * panel_width) for row in range(f.lanes)]
        if derive:
            _store_and_transpose(f, plan, stage, rows, panel_width, batch_width, back=True)
        else:
            for unit, column in enumerate(transpose(f, rows)):
                f.store(column, f["transposed"], unit * batch_width)

    return module.function(name, "ptr %saved, ptr %panel, ptr %transposed", make)


def through_group(module: Module, plan: Plan, stage: Stage, group: int, width: int) -> str:
    """`(gradient, added, skip, before, rows)`: take a panel's gradient from the head of a group that has no norm, or whose
    norm is done, through the group before it, in place.

    An addition at the head also sends the gradient to `added`. `skip` has what reaches the group before through additions,
    `before` its stored derivative.
    """
    earlier, sends = stage.groups[group - 1], plan.sends_gradient(stage, group)

    def make(f: Function) -> None:
        def row(number: Int) -> None:
            for c in range(0, width, f.lanes):
                place = f.add(f.mul(number, width), c)
                g = f.vload(f["gradient"], place, "gradient")
                if sends:
                    first = plan.adds_first(stage, group)
                    f.store(g if first else f.fadd(g, f.vload(f["added"], place)), f["added"], place)
                if earlier.tapped:
                    g = f.fadd(g, f.vload(f["skip"], place, "skip"))
                if stage.stores_derivative(group - 1):
                    g = f.fmul(g, f.vload(f["before"], f.add(f.mul(number, plan.pitch(stage)), c)))
                f.store(g, f["gradient"], place)

        f.loop(f["rows"], row, index="row")

    parameters = "ptr %gradient, ptr %added, ptr %skip, ptr %before, i64 %rows"
    return module.function(f"through_group_{stage.index}_{group}_w{width}", parameters, make)


def bias_update(module: Module, plan: Plan, width: int) -> str:
    """`(panel, bias, scalars, hyper)`: sum a panel's gradient over the batch and update the bias."""

    def make(f: Function) -> None:
        vectors = width // f.lanes
        lines = min(4, plan.batch)  # independent sums, to hide the latency of the addition
        whole = plan.batch // lines * lines

        def body(row: Int, *sums: Value) -> list[Value]:
            at = f.at(f["panel"], f.mul(row, width))
            return [f.fadd(sums[n], f.vload(at, n * f.lanes)) for n in range(lines * vectors)]

        sums = f.loop(whole, body, step=lines, carry=[f.zero] * (lines * vectors), index="row")
        for n in range((plan.batch - whole) * vectors):
            sums[n] = f.fadd(sums[n], f.vload(f["panel"], whole * width + n * f.lanes))
        update = Update(f, plan, f["scalars"], f["hyper"])
        for v in range(vectors):
            parts = sums[v::vectors]
            while len(parts) > 1:
                parts = [
                    f.fadd(parts[i], parts[i + 1]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)
                ]
            update.apply(parts[0], f["bias"], v * f.lanes)

    return module.function(f"bias_update_w{width}", "ptr %panel, ptr %bias, ptr %scalars, ptr %hyper", make)
