"""The forward pass, after gather.py has copied the rows: the product of each Linear and the operations that follow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code import batch_norm, elementwise, layer_norm, philox
from onelaunch.engines.cpu.code.elementwise import Operation
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.code.tile import Accumulators, Run, balanced, over_panels, over_tiles, product_tile
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.stages import Add, Stage
from onelaunch.integers import ceil_div, round_up
from onelaunch.run.network import Activation


def draw_dropout(phase: Phase, stage: Stage) -> None:
    """Draw the random bits of this partition's part of a stage, for every Dropout in it."""
    if not phase.training:
        return
    first_row, rows, first_column, columns = phase.plan.bits_region(stage, phase.partition)
    for group in stage.groups:
        for dropout in group.dropouts:
            if rows and columns:
                draw = philox.draw_bits(
                    phase.module, layer=dropout.layer, first_row=first_row, rows=rows, first_column=first_column,
                    columns=columns,
                )  # fmt: skip
                bits = phase.buffer(f"bits.{dropout.layer}.{phase.partition}")
                phase.f.call(draw, bits, phase.step(), phase.control("seed"))


def product(phase: Phase, stage: Stage) -> None:
    """Linear, bias and the operations that follow, on this partition's rows or columns."""
    f, plan = phase.f, phase.plan
    before = plan.stages[stage.index - 1]
    by_rows = phase.forward_by_rows(stage)
    first, last = plan.owned_rows(phase.partition, phase.batch) if by_rows else (0, phase.batch)
    panels = plan.panels(stage) if by_rows else plan.owned_panels(stage, phase.partition)
    if first == last or not panels:
        return
    draw_dropout(phase, stage)
    source, target = phase.output(before), phase.result(stage, 0)
    assert stage.linear is not None
    inputs, pitch = stage.linear.inputs, plan.pitch(stage)
    group = stage.groups[0]
    if phase.training and before.index:
        start = f.at(source, first * plan.pitch(before))
        phase.prefetch_columns_of_others(before, start, last - first, plan.pitch(before))
    inline = elementwise.is_cheap(group.operations) and not (phase.training and stage.stores_derivative(0))

    def panel(column: Int, width: int) -> None:
        vectors = width // f.lanes
        weights = f.at(phase.buffer(f"weight.{stage.index}"), f.mul(column, inputs), hint="weights")
        bias = f.at(phase.buffer(f"bias.{stage.index}"), column, hint="bias")

        def tile(rows: int, row: Int) -> None:
            kernel = _forward_tile(
                phase.module, rows, vectors, inputs, plan.pitch(before), pitch, group.operations if inline else ()
            )
            at = f.at(source, f.mul(row, plan.pitch(before)), hint="rows")
            result = f.at(f.at(target, f.mul(row, pitch)), column, hint="result")
            f.call(kernel, at, at, weights, result, bias)

        if phase.training:
            over_tiles(f, first, last, plan.target.max_rows(vectors), tile)
        else:
            _over_overlapping_tiles(f, plan, first, last, vectors, tile)
        numbers = range(int(inline), 1 if stage.layer_norms else len(stage.groups))
        apply_groups(phase, stage, column, width, (first, last), numbers)

    over_panels(f, panels, panel)
    if stage.layer_norms:
        apply_groups(phase, stage, 0, plan.padded(stage), (first, last), range(1, len(stage.groups)))


def _over_overlapping_tiles(
    f: Function, plan: Plan, first: int, last: int, vectors: int, tile: Callable[[int, Int], None]
) -> None:
    """Validation reuses the tile heights of training: the last tile overlaps rows that are already done."""
    height = balanced(plan.batch, plan.target.max_rows(vectors))[0][1]
    height = min(height, last - first)
    limit = last - height

    def body(number: Int) -> None:
        tile(height, f.minimum(f.add(f.mul(number, height), first), limit, "row"))

    f.loop(ceil_div(last - first, height), body, index="tile")


def _operations_name(operations: Sequence[Operation]) -> str:
    parts = []
    for operation in operations:
        assert isinstance(operation, Activation)
        slope = f"{operation.slope:.9g}".replace("-", "m").replace("+", "") if operation.name == "leaky_relu" else ""
        parts.append(operation.name + slope)
    return "_".join(["forward", *parts])


def _forward_tile(
    module: Module, rows: int, vectors: int, inputs: int, source_pitch: int, pitch: int, operations: Sequence[Operation]
) -> str:
    def start(f: Function) -> Accumulators:
        bias = [f.vload(f["extra"], v * f.lanes, "bias") for v in range(vectors)]
        return [bias for _ in range(rows)]

    def epilogue(f: Function, accumulators: Accumulators) -> None:
        for m, row in enumerate(accumulators):
            for v, value in enumerate(row):
                f.store(elementwise.forward(f, value, operations), f["c"], m * pitch + v * f.lanes)

    return product_tile(
        module, f"{_operations_name(operations)}_p{pitch}", rows=rows, vectors=vectors,
        runs=[Run(inputs, source_pitch, 1)], b_stride=vectors * module.target.lanes, start=start, epilogue=epilogue,
    )  # fmt: skip


def prepare_input(phase: Phase) -> None:
    """Stage 0: the layers before the first Linear, on this partition's columns."""
    f, plan = phase.f, phase.plan
    stage = plan.stages[0]
    draw_dropout(phase, stage)
    raw = phase.input_buffer() if phase.training else phase.output(stage)

    def panel(column: Int, width: int) -> None:
        apply_groups(phase, stage, column, width, (0, phase.batch), range(len(stage.groups)), source=raw)

    if stage.layer_norms:
        rows = plan.owned_rows(phase.partition, phase.batch)
        if rows[0] < rows[1]:
            apply_groups(phase, stage, 0, plan.padded(stage), rows, range(len(stage.groups)), source=raw)
    else:
        over_panels(f, plan.owned_panels(stage, phase.partition), panel)


def apply_groups(
    phase: Phase, stage: Stage, column: Int, width: int, rows: tuple[int, int], numbers: range, *,
    source: Value | None = None,
) -> None:  # fmt: skip
    """Apply some groups of a stage, by number, to `width` columns of some rows: a panel, or whole rows for a LayerNorm.

    `source` has the values that group 0 takes; otherwise the product has written them where the group's result goes.
    """
    f, plan = phase.f, phase.plan
    first, last = rows
    for number in numbers:
        group = stage.groups[number]
        position = f.add(f.mul(first, plan.pitch(stage)), column)
        result = f.at(phase.result(stage, number), position, hint="result")
        bits_pitch, bits = _bits_at(phase, stage, number, column) if phase.training else (0, [])
        stores = phase.training and stage.stores_derivative(number)
        kept = f.at(phase.buffer(f"derivative.{stage.index}.{number}"), position, hint="kept") if stores else result
        before = f.at(phase.result(stage, number - 1), position, hint="values") if number else result
        values = f.at(source, position, hint="values") if source and not number else before
        if not (group.batch_norm or group.layer_norm):
            added = values
            if isinstance(group.head, Add):
                added = f.at(phase.result(plan.stages[group.head.stage], group.head.group), position, hint="added")
            if group.head or group.operations or source:
                apply = _apply_group(phase.module, plan, stage, number, width, training=phase.training)
                f.call(apply, values, added, result, kept, last - first, bits_pitch, *bits)
            continue
        own = f.at(phase.buffer(f"normalised.{stage.index}.{number}"), position) if phase.training else values
        if group.layer_norm:
            norm = layer_norm.forward(phase.module, plan, stage, number, training=phase.training)
            names = (f"{name}.{stage.index}.{number}" for name in ("scale", "shift"))
            kept_rows = f.at(phase.buffer(f"row_deviation.{stage.index}.{number}"), first) if phase.training else values
            f.call(
                norm, values, own, result, kept, bits_pitch, *map(phase.buffer, names), kept_rows, last - first, *bits
            )  # fmt: skip
            continue
        assert first == 0 or not phase.training
        kernel = batch_norm.forward(
            phase.module, plan, stage, number, width, training=phase.training, all_rows=last - first
        )
        vectors = [
            f.at(phase.buffer(f"{name}.{stage.index}.{number}"), column)
            for name in ("scale", "shift", "mean", "variance", "deviation")
        ]
        f.call(
            kernel, values, own, result, kept, bits_pitch, *vectors, phase.rows,
            _running_factor(phase, stage, number), *bits,
        )  # fmt: skip


def _running_factor(phase: Phase, stage: Stage, number: int) -> Value:
    """The weight of this batch in the running statistics: the momentum, or 1 / batches for a cumulative average."""
    f, layer = phase.f, stage.groups[number].batch_norm
    assert layer is not None
    if layer.momentum is not None:
        return f.scalar(layer.momentum)
    if not phase.training:
        return f.scalar(0.0)
    before = f.load("double", phase.buffer(f"batches.{stage.index}.{number}"), hint="batches")
    step = f.op("double", f"sitofp i64 {phase.step().text} to double", "step")
    count = f.fadd(f.fadd(before, step), Value("double", "1.0"), "batches")
    factor = f.fdiv(Value("double", "1.0"), count)
    return f.op("float", f"fptrunc double {factor.text} to float", "factor")


def _bits_at(phase: Phase, stage: Stage, number: int, column: Int) -> tuple[int, list[Value]]:
    """(random values per row, where this panel's begin for each Dropout of a group)."""
    f, plan = phase.f, phase.plan
    _, _, first_column, columns = plan.bits_region(stage, phase.partition)
    starts = [phase.buffer(f"bits.{dropout.layer}.{phase.partition}") for dropout in stage.groups[number].dropouts]
    return round_up(columns, 8), [f.at(start, f.sub(column, first_column), "i16", "bits") for start in starts]


def _apply_group(module: Module, plan: Plan, stage: Stage, number: int, width: int, *, training: bool) -> str:
    """`(source, added, output, derivative, rows, bits_pitch, bits...)`: a group without a norm over `width` columns."""
    group = stage.groups[number]
    dropouts = group.dropouts if training else ()
    parameters = "ptr %source, ptr %added, ptr %output, ptr %derivative, i64 %rows, i64 %bits_pitch"
    parameters += "".join(f", ptr %bits{n}" for n in range(len(dropouts)))
    pitch = plan.pitch(stage)

    def make(f: Function) -> None:
        def row(index: Int) -> None:
            def vector(c: Int) -> None:
                position = f.add(f.mul(index, pitch), c)
                value = f.vload(f["source"], position)
                if isinstance(group.head, Add):
                    value = f.fadd(value, f.vload(f["added"], position), "sum")
                bits = batch_norm.load_bits(f, [f[f"bits{n}"] for n in range(len(dropouts))], index, c)
                if training and stage.stores_derivative(number):
                    value, derivative = elementwise.forward_with_derivative(f, value, group.operations, bits)
                    f.store(derivative, f["derivative"], position)
                else:
                    value = elementwise.forward(f, value, group.operations, bits)
                f.store(value, f["output"], position)

            if width > plan.panel_width:
                f.loop(width, vector, step=f.lanes, index="column")
            else:
                for c in range(0, width, f.lanes):
                    vector(c)

        f.loop(f["rows"], row, index="row")

    return module.function(
        f"apply_{'train' if training else 'validate'}_{stage.index}_{number}_w{width}", parameters, make
    )
