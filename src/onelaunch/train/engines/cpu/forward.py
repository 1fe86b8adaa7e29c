"""The forward half of a step: gather the rows, multiply, and apply what follows each Linear."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.train.engines.cpu import elementwise, norm, random_bits
from onelaunch.train.engines.cpu.elementwise import Operation
from onelaunch.train.engines.cpu.emit import Function, Int, Module, Value
from onelaunch.train.engines.cpu.phase import Phase
from onelaunch.train.engines.cpu.plan import CACHE_LINE, Plan, round_up
from onelaunch.train.engines.cpu.stages import Stage
from onelaunch.train.engines.cpu.tile import Accumulators, Run, balanced, over_panels, over_tiles, product_tile
from onelaunch.train.network import Activation


def gather(phase: Phase, target: Value, order: Value, first_row: Int, rows: Value) -> None:
    """A batch into `target` (this share's rows of it, where all shares read one copy); rows past the end become zero."""
    f, plan = phase.f, phase.plan
    private = phase.training and plan.private_input
    first, last = (0, phase.batch) if private else plan.owned_rows(phase.share, phase.batch)
    if first == last:
        return
    stage = plan.stages[0]
    x = phase.control("x" if phase.training else "check_x", "ptr")
    copy = _copy_row(phase.module, plan)
    clear = _clear_row(phase.module, plan)
    stop = f.minimum(rows, last)
    element = "i8" if plan.settings.bytes_in else "float"

    def one(row: Int) -> None:
        if phase.training:
            number = f.load("i32", order, row, element="i32", hint="sample")
            sample: Int = f.op("i64", f"zext i32 {number.text} to i64", "sample")
        else:
            sample = f.add(first_row, row)
        source = f.at(x, f.mul(sample, stage.width), element, "source")
        f.call(copy, source, f.at(target, f.mul(row, plan.pitch(stage))))

    f.loop(stop, one, start=first, index="row")
    begin = f.intrinsic("i64", "smax.i64", stop, f.i64(first), hint="missing")
    f.loop(last, lambda row: f.call(clear, f.at(target, f.mul(row, plan.pitch(stage)))), start=begin, index="row")


class NextRows:
    """Asks for the next batch's rows piece by piece, between the tiles of dW: they come from far away, in random order."""

    def __init__(self, phase: Phase, tiles: int) -> None:
        f, plan = phase.f, phase.plan
        self.f, self.phase = f, phase
        following = f.i64(f.add(phase.first_row, plan.batch, "following"))
        left = f.minimum(f.sub(phase.control("rows"), following), plan.batch)
        more = f.compare("slt", f.i64(f.add(f["j"], 1)), phase.control("count"), "more")
        self.rows = f.select(more, left, f.i64(0), "next_rows")
        self.order = f.at(phase.order, plan.batch, "i32", "next_order")
        self.x = phase.control("x", "ptr")
        self.piece = f.op("ptr", "alloca i64", "piece")
        f.store(f.i64(0), self.piece)
        self.line = CACHE_LINE if plan.settings.bytes_in else CACHE_LINE // 4
        lines = -(-plan.stages[0].width // self.line)
        self.lines_each = min(lines, -(-plan.batch * lines // max(1, tiles)))
        self.pieces = -(-lines // self.lines_each)

    def ask(self) -> None:
        f, plan = self.f, self.phase.plan
        piece = f.load("i64", self.piece, hint="piece")
        f.store(f.i64(f.add(piece, 1)), self.piece)
        kernel = self._kernel()
        row = f.op("i64", f"udiv i64 {piece.text}, {self.pieces}", "row")

        def fetch() -> None:
            place = f.sub(piece, f.mul(row, self.pieces))
            number = f.load("i32", self.order, row, element="i32", hint="sample")
            sample = f.op("i64", f"zext i32 {number.text} to i64", "sample")
            at = f.add(f.mul(sample, plan.stages[0].width), f.mul(place, self.lines_each * self.line))
            f.call(kernel, f.at(self.x, at, "i8" if plan.settings.bytes_in else "float"))

        f.when(f.compare("slt", row, self.rows), fetch)

    def _kernel(self) -> str:
        def make(f: Function) -> None:
            for line in range(self.lines_each):
                f.prefetch(f["x"], line * CACHE_LINE // 4, locality=2)

        return self.phase.module.function(f"fetch_{self.lines_each}_lines", "ptr %x", make)


def _copy_row(module: Module, plan: Plan) -> str:
    width = plan.stages[0].width

    def make(f: Function) -> None:
        def vector(column: Int, count: int) -> None:
            if not plan.settings.bytes_in:
                value = f.vload_first(f.at(f["source"], column), count)
            else:
                packed = f.vload_first(f.at(f["source"], column, "i8"), count, "i8", "bytes")
                value = _divide_by_255(f, f.op(f.vector, f"uitofp {packed.type} {packed.text} to {f.vector}", "number"))
            f.store(value, f["target"], column)

        whole = width // f.lanes * f.lanes
        f.loop(whole, lambda column: vector(column, f.lanes), step=f.lanes, index="column")
        if width > whole:
            vector(whole, width - whole)

    return module.function("copy_row", "ptr %source, ptr %target", make)


def _divide_by_255(f: Function, x: Value) -> Value:
    """x / 255, rounded as a division would: a product, then one correction by its remainder (exact for 0 to 255)."""
    if not f.module.target.has_fma:
        return f.fdiv(x, f.constant(255.0))
    inverse = f.constant(1 / 255)
    quotient = f.fmul(x, inverse, "quotient")
    remainder = f.intrinsic(f.vector, f"fma.v{f.lanes}f32", quotient, f.constant(-255.0), x, hint="remainder")
    return f.intrinsic(f.vector, f"fma.v{f.lanes}f32", remainder, inverse, quotient, hint="quotient")


def _clear_row(module: Module, plan: Plan) -> str:
    def make(f: Function) -> None:
        width = plan.padded(plan.stages[0])
        f.loop(width, lambda column: f.store(f.zero, f["target"], column), step=f.lanes, index="column")

    return module.function("clear_row", "ptr %target", make)


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
