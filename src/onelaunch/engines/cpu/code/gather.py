"""Copy a batch's rows out of the data set (uint8 rows become floats), and prefetch the rows of the next batch."""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.plan.plan import CACHE_LINE, Plan
from onelaunch.integers import ceil_div


def gather(phase: Phase, target: Value, order: Value, first_row: Int, rows: Value) -> None:
    """Copy a batch into `target`; rows past the end become zero. Where all partitions read one copy, each writes its rows."""
    f, plan = phase.f, phase.plan
    private = phase.training and plan.private_input
    first, last = (0, phase.batch) if private else plan.owned_rows(phase.partition, phase.batch)
    if first == last:
        return
    stage = plan.stages[0]
    x = phase.control("x" if phase.training else "validation_x", "ptr")
    copy = _copy_row(phase.module, plan)
    clear = _clear_row(phase.module, plan)
    stop = f.minimum(rows, last)
    element = "i8" if plan.settings.uint8_rows else "float"

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
    """Prefetches the next batch's rows piece by piece, between the tiles of dW: in random order they miss every cache."""

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
        self.line = CACHE_LINE if plan.settings.uint8_rows else CACHE_LINE // 4
        lines = ceil_div(plan.stages[0].width, self.line)
        self.lines_each = min(lines, ceil_div(plan.batch * lines, max(1, tiles)))
        self.pieces = ceil_div(lines, self.lines_each)

    def prefetch_piece(self) -> None:
        f, plan = self.f, self.phase.plan
        piece = f.load("i64", self.piece, hint="piece")
        f.store(f.i64(f.add(piece, 1)), self.piece)
        kernel = self._kernel()
        row = f.op("i64", f"udiv i64 {piece.text}, {self.pieces}", "row")

        def prefetch() -> None:
            number_in_row = f.sub(piece, f.mul(row, self.pieces))
            number = f.load("i32", self.order, row, element="i32", hint="sample")
            sample = f.op("i64", f"zext i32 {number.text} to i64", "sample")
            at = f.add(f.mul(sample, plan.stages[0].width), f.mul(number_in_row, self.lines_each * self.line))
            f.call(kernel, f.at(self.x, at, "i8" if plan.settings.uint8_rows else "float"))

        f.when(f.compare("slt", row, self.rows), prefetch)

    def _kernel(self) -> str:
        def make(f: Function) -> None:
            for line in range(self.lines_each):
                f.prefetch(f["x"], line * CACHE_LINE // 4, locality=2)

        return self.phase.module.function(f"prefetch_{self.lines_each}_lines", "ptr %x", make)


def _copy_row(module: Module, plan: Plan) -> str:
    width = plan.stages[0].width

    def make(f: Function) -> None:
        def vector(column: Int, count: int) -> None:
            if not plan.settings.uint8_rows:
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
    """x / 255 with the rounding of a division: a product, then one correction by its remainder (exact for 0 to 255)."""
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
