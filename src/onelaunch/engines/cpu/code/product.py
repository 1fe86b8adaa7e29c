"""The products of the forward pass and of dX: tiles over `panels` panels of b.

    forward   a: rows of the batch      b: panels of the weights               start: the bias   c: activations
    dX        a: rows of the weights    b: the transposed gradient, by batch   start: zero       c: partial sums
                                           panels

A product has `repeats` runs of `length` terms, and a moves by `jump` from one to the next: the weights of dX are in panels.
The last run has `last_length` terms, and `last_row` floats from one row of a to the next.

`floor` is the relu of the forward pass: 0, or minus infinity to keep every value. The kernels also prefetch: what another
core has just written is loaded before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel, Unit
from onelaunch.engines.cpu.code.tile import TILE_FIELDS, TILES, accumulate, epilogue, over_heights, over_tiles
from onelaunch.integers import ceil_div

UNIT = Unit("product")
FIELDS = (
    "ptr a, ptr odd_a, ptr b, ptr c, ptr start, i64 b_panel, i64 c_panel, i64 start_panel, i64 a_row, i64 c_row, "
    f"i64 length, i64 repeats, i64 jump, i64 last_row, i64 last_length, float floor, {TILE_FIELDS}"
)
PRODUCTS = {vectors: Kernel(f"product_{vectors}", FIELDS, "j") for vectors in (1, 2)}  # by vectors per panel
PREFETCH = Kernel("prefetch", "ptr start, i64 rows, i64 row_bytes, i64 lines")


def emit(module: Module) -> None:
    for vectors, kernel in PRODUCTS.items():
        module.kernel(kernel, lambda f, vectors=vectors: _product(f, vectors))  # type: ignore[misc]
    module.kernel(PREFETCH, _prefetch)


def by_parity(f: Function, even: Value, odd: Value) -> Value:
    """`even` or `odd`, by the step's number in the native call: two input buffers alternate."""
    return f.select(f.op("i1", f"trunc i64 {f['j'].text} to i1", "is_odd"), odd, even)


def _product(f: Function, vectors: int) -> None:
    a = by_parity(f, f["a"], f["odd_a"])

    def panel(number: Int) -> None:
        b = f.at(f["b"], f.mul(number, f["b_panel"]), hint="b")
        c = f.at(f["c"], f.mul(number, f["c_panel"]), hint="c")
        start = f.at(f["start"], f.mul(number, f["start_panel"]), hint="start")
        over_heights(
            f, f.target.heights(vectors),
            lambda height, tiles: f.call(_tiles(f.module, height, vectors), a, b, start, c, f["fields"], *tiles),
        )  # fmt: skip

    f.loop(f["panels"], panel, index="panel")


def _tiles(module: Module, rows: int, vectors: int) -> str:
    """Tiles of one height in one panel."""

    def make(f: Function) -> None:
        f.load_fields(
            PRODUCTS[vectors], "a_row", "c_row", "length", "repeats", "jump", "floor", "last_row", "last_length"
        )
        width = vectors * f.lanes
        spare = f.op("ptr", f"alloca [{rows * width} x float], align 64", "spare")
        start = [f.vload(f["start"], v * f.lanes, "start") for v in range(vectors)]
        floor = f.splat(f["floor"], "floor")
        last, columns = f.i64(f.sub(f["repeats"], 1)), f.mul(f["length"], width)

        def tile(first: Value, valid: Value) -> None:
            def repeat(number: Int, *values: Value) -> list[Value]:
                is_last = f.compare("eq", f.i64(number), last, "is_last")
                length = f.select(is_last, f["last_length"], f["length"], "length")
                stride = f.i64(f.mul(f.select(is_last, f["last_row"], f["a_row"], "a_row"), 4))  # bytes
                a = f.at(f.at(f["a"], f.mul(number, f["jump"])), f.mul(first, stride), "i8")
                every_third = [a]
                while len(every_third) < ceil_div(rows, 3):
                    every_third.append(f.at(every_third[-1], f.mul(stride, 3), "i8", "third"))

                def row_addresses(firsts: Sequence[Value]) -> list[Value]:
                    return [f.at(firsts[m // 3], f.mul(m % 3, stride), "i8") for m in range(rows)]

                b = f.at(f["b"], f.mul(number, columns), hint="b")
                return accumulate(f, vectors, length, b, values, every_third, 4, row_addresses)

            carried = f.loop(f["repeats"], repeat, carry=start * rows, index="repeat")
            c = f.at(f["c"], f.mul(first, f["c_row"]), hint="c")

            def row(m: Int, values: Sequence[Value]) -> None:
                at = f.at(c, f.mul(m, f["c_row"]))
                for v, value in enumerate(values):
                    f.store(f.at_least(value, floor, "result"), at, v * f.lanes)

            epilogue(f, carried, vectors, valid, spare, row)

        over_tiles(f, rows, tile)

    parameters = f"ptr %a, ptr %b, ptr %start, ptr %c, ptr %fields, {TILES}"
    return module.function(f"product_tiles_{rows}x{vectors}", parameters, make)


def _prefetch(f: Function) -> None:
    def row(number: Int) -> None:
        start = f.at(f["start"], f.mul(number, f["row_bytes"]), "i8", "row")
        f.loop(f["lines"], lambda line: f.prefetch(start, f.mul(line, 16)), index="line")

    f.loop(f["rows"], row, index="row")
