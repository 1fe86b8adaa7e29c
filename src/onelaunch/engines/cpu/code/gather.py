"""Copy a batch's rows out of the data set; uint8 rows become floats."""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.product import by_parity

# Rows [first, last) of the batch; rows past its end become zero. `ahead` is the batch size, to copy the next batch into the
# other of two alternating buffers, or 0 to copy this one.
GATHER = Kernel(
    "gather",
    "ptr x, ptr target, ptr odd_target, i64 width, i64 pitch, i64 first, i64 last, i64 ahead",
    "j first_row rows next_rows order",
)


def emit(module: Module, uint8_rows: bool, shuffled: bool) -> None:
    """`shuffled`: the rows are those that `order` names, else consecutive ones (validation)."""
    module.kernel(GATHER, lambda f: _gather(f, uint8_rows, shuffled))


def _gather(f: Function, uint8_rows: bool, shuffled: bool) -> None:
    this_batch = f.compare("eq", f["ahead"], f.i64(0), "this_batch")
    rows = f.select(this_batch, f["rows"], f["next_rows"], "rows")
    target = by_parity(f, f["target"], f["odd_target"])
    order = f.at(f["order"], f["ahead"], "i32", "order")
    element = "i8" if uint8_rows else "float"

    def one(row: Int) -> None:
        if shuffled:
            number = f.load("i32", order, row, element="i32", hint="sample")
            sample: Int = f.op("i64", f"zext i32 {number.text} to i64", "sample")
        else:
            sample = f.add(f["first_row"], row)
        source = f.at(f["x"], f.mul(sample, f["width"]), element, "source")
        _copy_row(f, source, f.at(target, f.mul(row, f["pitch"])), uint8_rows)

    def clear(row: Int) -> None:
        at = f.at(target, f.mul(row, f["pitch"]))
        f.loop(f["width"], lambda column: f.store(f.zero, at, column), step=f.lanes, index="column")

    def copy() -> None:
        stop = f.minimum(rows, f["last"])
        f.loop(stop, one, start=f["first"], index="row")
        f.loop(f["last"], clear, start=f.intrinsic("i64", "smax.i64", stop, f["first"], hint="missing"), index="row")

    f.when(f.compare("ne", rows, f.i64(0), "any"), copy)


def _copy_row(f: Function, source: Value, target: Value, uint8_rows: bool) -> None:
    element = "i8" if uint8_rows else "float"

    def convert(value: Value) -> Value:
        if not uint8_rows:
            return value
        return _divide_by_255(f, f.op(f.vector, f"uitofp {value.type} {value.text} to {f.vector}", "number"))

    def vector(column: Int) -> None:
        packed = f.load(f"<{f.lanes} x {element}>", source, column, element=element, hint="values")
        f.store(convert(packed), target, column)

    whole = f.op("i64", f"and i64 {f['width'].text}, {-f.lanes}", "whole")
    rest = f.i64(f.sub(f["width"], whole, "rest"))
    f.loop(whole, vector, step=f.lanes, index="column")

    def part() -> None:
        packed = f.vload_where(f.lanes_below(rest), f.at(source, whole, element), element)
        f.store(convert(packed), target, whole)

    f.when(f.compare("ne", rest, f.i64(0), "any"), part)


def _divide_by_255(f: Function, x: Value) -> Value:
    """x / 255 with the rounding of a division: a product, then one correction by its remainder (exact for 0 to 255)."""
    if not f.module.target.has_fma:
        return f.fdiv(x, f.constant(255.0))
    inverse = f.constant(1 / 255)
    quotient = f.fmul(x, inverse, "quotient")
    remainder = f.intrinsic(f.vector, f"fma.v{f.lanes}f32", quotient, f.constant(-255.0), x, hint="remainder")
    return f.intrinsic(f.vector, f"fma.v{f.lanes}f32", remainder, inverse, quotient, hint="quotient")
