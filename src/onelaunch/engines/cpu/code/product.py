"""The products of the forward pass and of dX: tiles over `panels` panels of b.

    forward   a: rows of the batch      b: panels of the weights               start: the bias        c: activations
    dX        a: rows of the weights    b: the transposed gradient, by batch   start: zero, or what    c: partial sums
                                           panels                                 an earlier call stored

`floor` is the relu of the forward pass: 0, or minus infinity to keep every value. The kernels also prefetch: what another
core has just written is loaded before it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel, Unit
from onelaunch.engines.cpu.code.tile import TILE_FIELDS, accumulate, epilogue, over_tiles
from onelaunch.integers import ceil_div

UNIT = Unit("product")
FIELDS = (
    "ptr a, ptr odd_a, ptr b, ptr c, ptr start, i64 b_panel, i64 c_panel, i64 start_panel, i64 a_row, i64 c_row, "
    f"i64 start_row, i64 length, i64 repeats, i64 jump, float floor, {TILE_FIELDS}"
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

        def tile(height: int, row: Value, valid: Value) -> None:
            kernel = _tile(f.module, height, vectors)
            a_at, c_at = f.at(a, f.mul(row, f["a_row"])), f.at(c, f.mul(row, f["c_row"]))
            f.call(kernel, a_at, b, f.at(start, f.mul(row, f["start_row"])), c_at, valid, f["fields"])

        over_tiles(f, vectors, tile)

    f.loop(f["panels"], panel, index="panel")


def _tile(module: Module, rows: int, vectors: int) -> str:
    def make(f: Function) -> None:
        f.load_fields(PRODUCTS[vectors], "a_row", "c_row", "start_row", "length", "repeats", "jump", "floor")
        width = vectors * f.lanes
        starts = _row_addresses(f, f["start"], f["start_row"], rows)
        carried = [f.vload(at, v * f.lanes, "start") for at in starts for v in range(vectors)]
        columns = f.mul(f["length"], width)

        stride = f.i64(f.mul(f["a_row"], 4))  # bytes

        def repeat(number: Int, *values: Value) -> list[Value]:
            every_third = _row_addresses(
                f, f.at(f["a"], f.mul(number, f["jump"])), f.mul(f["a_row"], 3), ceil_div(rows, 3)
            )
            every_third = [f.opaque(address, "third") for address in every_third]

            def addresses(k: Int) -> list[Value]:
                firsts = [f.at(address, k) for address in every_third]
                return [f.at(firsts[m // 3], f.mul(m % 3, stride), "i8") for m in range(rows)]

            b = f.at(f["b"], f.mul(number, columns), hint="b")
            return accumulate(f, vectors, f["length"], b, values, addresses)

        carried = f.loop(f["repeats"], repeat, carry=carried, index="repeat")
        floor = f.splat(f["floor"], "floor")
        stores = _row_addresses(f, f["c"], f["c_row"], rows)

        def row(m: int, values: Sequence[Value]) -> None:
            for v, value in enumerate(values):
                f.store(f.at_least(value, floor, "result"), stores[m], v * f.lanes)

        epilogue(f, carried, vectors, row)

    parameters = "ptr %a, ptr %b, ptr %start, ptr %c, i64 %valid, ptr %fields"
    return module.function(f"product_tile_{rows}x{vectors}", parameters, make)


def _row_addresses(f: Function, first: Value, stride: Int, rows: int) -> list[Value]:
    found = [first]
    while len(found) < rows:
        found.append(f.at(found[-1], stride, hint="row"))
    return found


def _prefetch(f: Function) -> None:
    def row(number: Int) -> None:
        start = f.at(f["start"], f.mul(number, f["row_bytes"]), "i8", "row")
        f.loop(f["lines"], lambda line: f.prefetch(start, f.mul(line, 16)), index="line")

    f.loop(f["rows"], row, index="row")
