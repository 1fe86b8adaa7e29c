"""The forward half of a step, after gather.py has brought the rows: multiply, and apply what follows each Linear."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import batch_norm as norm
from onelaunch.engines.cpu.code import elementwise
from onelaunch.engines.cpu.code import philox as random_bits
from onelaunch.engines.cpu.code.elementwise import Operation
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.code.tile import Accumulators, Run, balanced, over_panels, over_tiles, product_tile
from onelaunch.engines.cpu.plan.plan import Plan, round_up
from onelaunch.engines.cpu.plan.stages import Stage
from onelaunch.run.network import Activation


def draw_dropout(phase: Phase, stage: Stage) -> None:
    """The random bits of this share's part of a stage, for every Dropout in it."""
    if not phase.training:
        return
    first_row, rows, first_column, columns = phase.plan.bits_region(stage, phase.share)
    for group in stage.groups:
        for dropout in group.dropouts:
            if rows and columns:
                draw = random_bits.draw_bits(
                    phase.module, layer=dropout.layer, first_row=first_row, rows=rows, first_column=first_column,
                    columns=columns,
                )  # fmt: skip
                bits = phase.buffer(f"bits.{dropout.layer}.{phase.share}")
                phase.f.call(draw, bits, phase.step(), phase.control("seed"))


def product(phase: Phase, stage: Stage) -> None:
    """Linear, bias and what follows, on this share's rows or columns."""
    f, plan = phase.f, phase.plan
    before = plan.stages[stage.index - 1]
    by_rows = phase.forward_by_rows(stage)
    first, last = plan.owned_rows(phase.share, phase.batch) if by_rows else (0, phase.batch)
    panels = plan.panels(stage) if by_rows else plan.owned_panels(stage, phase.share)
    if first == last or not panels:
        return
    draw_dropout(phase, stage)
    source, target = phase.output(before), phase.result(stage, 0)
    assert stage.linear is not None
    inputs, pitch = stage.linear.inputs, plan.pitch(stage)
    group = stage.groups[0]
    if phase.training and before.index:
        start = f.at(source, first * plan.pitch(before))
        phase.fetch_columns_of_others(before, start, last - first, plan.pitch(before))
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
            over_tiles(f, first, last, plan.target.most_rows(vectors), tile)
        else:
            _over_overlapping_tiles(f, plan, first, last, vectors, tile)
        follow(phase, stage, column, width, first, last, skip_first=inline)

    over_panels(f, panels, panel)


def _over_overlapping_tiles(f: Function, plan: Plan, first: int, last: int, vectors: int, tile: object) -> None:
    """Evaluation reuses the tile heights of training: the last tile is moved back over rows already done."""
    height = balanced(plan.batch, plan.target.most_rows(vectors))[0][1]
    height = min(height, last - first)
    limit = last - height

    def body(number: Int) -> None:
        tile(height, f.minimum(f.add(f.mul(number, height), first), limit, "row"))  # type: ignore[operator]

    f.loop(-(-(last - first) // height), body, index="tile")


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

    def finish(f: Function, accumulators: Accumulators) -> None:
        for m, row in enumerate(accumulators):
            for v, value in enumerate(row):
                f.store(elementwise.forward(f, value, operations), f["c"], m * pitch + v * f.lanes)

    return product_tile(
        module, f"{_operations_name(operations)}_p{pitch}", rows=rows, vectors=vectors,
        runs=[Run(inputs, source_pitch, 1)], b_stride=vectors * module.target.lanes, start=start, finish=finish,
    )  # fmt: skip


def prepare_input(phase: Phase) -> None:
    """Stage 0: what stands in front of the first Linear, on this share's columns."""
    f, plan = phase.f, phase.plan
    stage = plan.stages[0]
    draw_dropout(phase, stage)
    raw = phase.input_buffer() if phase.training else phase.output(stage)

    def panel(column: Int, width: int) -> None:
        follow(phase, stage, column, width, 0, phase.batch, skip_first=False, source=raw)

    over_panels(f, plan.owned_panels(stage, phase.share), panel)


def follow(
    phase: Phase, stage: Stage, column: Int, width: int, first: int, last: int, *, skip_first: bool,
    source: Value | None = None,
) -> None:  # fmt: skip
    """The groups of a stage on one panel, after its product; `skip_first`: the tiles have done the first one."""
    f, plan = phase.f, phase.plan
    for number, group in enumerate(stage.groups):
        place = f.add(f.mul(first, plan.pitch(stage)), column)
        result = f.at(phase.result(stage, number), place, hint="result")
        bits_pitch, bits = _bits_at(phase, stage, number, column) if phase.training else (0, [])
        stores = phase.training and stage.stores_derivative(number)
        kept = f.at(phase.buffer(f"derivative.{stage.index}.{number}"), place, hint="kept") if stores else result
        if number == 0:
            came_from = f.at(source, place, hint="values") if source else result
            if not skip_first and (group.operations or source):
                apply = _apply_group(phase.module, plan, stage, number, width, training=phase.training)
                f.call(apply, came_from, result, kept, last - first, bits_pitch, *bits)
            continue
        own = phase.buffer(f"normal.{stage.index}.{number}") if phase.training else phase.output(stage)
        assert first == 0 or not phase.training
        kernel = norm.forward(phase.module, plan, stage, number, width, training=phase.training, all_rows=last - first)
        vectors = [
            f.at(phase.buffer(f"{name}.{stage.index}.{number}"), column)
            for name in ("scale", "shift", "mean", "variance", "deviation")
        ]
        f.call(
            kernel, f.at(own, place, hint="values"), result, kept, bits_pitch, *vectors, phase.rows,
            _running_factor(phase, stage, number), *bits,
        )  # fmt: skip


def _running_factor(phase: Phase, stage: Stage, number: int) -> Value:
    """How much of a batch goes into the running statistics: the momentum, or 1 / batches for a plain average."""
    f, norm_layer = phase.f, stage.groups[number].norm
    assert norm_layer is not None
    if norm_layer.momentum is not None:
        return f.scalar(norm_layer.momentum)
    if not phase.training:
        return f.scalar(0.0)
    before = f.load("double", phase.buffer(f"batches.{stage.index}.{number}"), hint="batches")
    step = f.op("double", f"sitofp i64 {phase.step().text} to double", "step")
    count = f.fadd(f.fadd(before, step), Value("double", "1.0"), "batches")
    factor = f.fdiv(Value("double", "1.0"), count)
    return f.op("float", f"fptrunc double {factor.text} to float", "factor")


def _bits_at(phase: Phase, stage: Stage, number: int, column: Int) -> tuple[int, list[Value]]:
    """(numbers a row, where this panel's start) for each Dropout of a group."""
    f, plan = phase.f, phase.plan
    _, _, first_column, columns = plan.bits_region(stage, phase.share)
    starts = [phase.buffer(f"bits.{dropout.layer}.{phase.share}") for dropout in stage.groups[number].dropouts]
    return round_up(columns, 8), [f.at(start, f.sub(column, first_column), "i16", "bits") for start in starts]


def _apply_group(module: Module, plan: Plan, stage: Stage, number: int, width: int, *, training: bool) -> str:
    """`(source, output, derivative, rows, bits_pitch, bits...)`: element-wise operations over a panel."""
    group = stage.groups[number]
    dropouts = group.dropouts if training else ()
    parameters = "ptr %source, ptr %output, ptr %derivative, i64 %rows, i64 %bits_pitch"
    parameters += "".join(f", ptr %bits{n}" for n in range(len(dropouts)))
    pitch = plan.pitch(stage)

    def make(f: Function) -> None:
        def row(index: Int) -> None:
            for c in range(0, width, f.lanes):
                place = f.add(f.mul(index, pitch), c)
                value = f.vload(f["source"], place)
                bits = norm.load_bits(f, [f[f"bits{n}"] for n in range(len(dropouts))], index, c)
                if training and stage.stores_derivative(number):
                    value, derivative = elementwise.forward_with_derivative(f, value, group.operations, bits)
                    f.store(derivative, f["derivative"], place)
                else:
                    value = elementwise.forward(f, value, group.operations, bits)
                f.store(value, f["output"], place)

        f.loop(f["rows"], row, index="row")

    return module.function(
        f"apply_{'train' if training else 'check'}_{stage.index}_{number}_w{width}", parameters, make
    )
