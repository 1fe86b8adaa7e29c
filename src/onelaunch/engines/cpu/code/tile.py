"""The micro-kernel of all products: a tile whose accumulators stay in registers from the first term to the epilogue.

    acc[m][v] = start[m][v] + sum over k of  a[m, k] * b[k, v]

a is read one float at a time and broadcast, b one vector at a time. All strides are constants, so the rows of a tile partition
a base register and differ by a displacement. The forward has the bias in `start` and the activation in its epilogue; the
epilogue of dW is the optimizer's update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.integers import ceil_div

Accumulators = list[list[Value]]  # [row][vector]
UNROLL = 4
TILE_PARAMETERS = "ptr %a, ptr %a2, ptr %b, ptr %c, ptr %extra"


@dataclass(frozen=True)
class Run:
    """A range of k: `repeats` times `length` terms; a's base advances by `jump` from one repeat to the next."""

    length: int
    row_stride: int  # floats from a[m, k] to a[m + 1, k]
    k_stride: int  # floats from a[m, k] to a[m, k + 1]
    repeats: int = 1
    jump: int = 0

    @property
    def name(self) -> str:
        repeated = f"{self.repeats}of{self.jump}_" if self.repeats > 1 else ""
        return f"k{repeated}{self.length}_s{self.row_stride}_{self.k_stride}"


def product_tile(
    module: Module, name: str, *, rows: int, vectors: int, runs: Sequence[Run], b_stride: int,
    epilogue: Callable[[Function, Accumulators], None], start: Callable[[Function], Accumulators] | None = None,
    before: Callable[[Function], None] | None = None,
) -> str:  # fmt: skip
    """The function `tile(a, a2, b, c, extra)`; the first of `runs` reads a, an optional second one reads a2."""
    assert len(runs) <= 2
    full_name = f"{name}_{rows}x{vectors}_{'_'.join(run.name for run in runs)}_b{b_stride}"

    def make(f: Function) -> None:
        if before:
            before(f)
        zero = [[f.zero] * vectors for _ in range(rows)]
        carried = [value for row in (start(f) if start else zero) for value in row]
        b = f["b"]
        for run, a in zip(runs, (f["a"], f["a2"]), strict=False):
            carried = _run(f, run, rows, vectors, a, b, b_stride, carried)
            b = f.at(b, run.repeats * run.length * b_stride, hint="b")
        epilogue(f, [carried[row * vectors : (row + 1) * vectors] for row in range(rows)])

    return module.function(full_name, TILE_PARAMETERS, make)


def _run(
    f: Function, run: Run, rows: int, vectors: int, a: Value, b: Value, b_stride: int, carried: Sequence[Value]
) -> list[Value]:
    whole = run.length // UNROLL * UNROLL

    def terms(a_at: Value, b_at: Value, count: int, values: list[Value]) -> list[Value]:
        for k in range(count):
            b_row = [f.vload(b_at, k * b_stride + v * f.lanes, "b") for v in range(vectors)]
            for m in range(rows):
                a_all = f.splat(f.load("float", a_at, m * run.row_stride + k * run.k_stride, hint="a"), "a")
                for v in range(vectors):
                    values[m * vectors + v] = f.fma(a_all, b_row[v], values[m * vectors + v], "acc")
        return values

    def repeat(number: Int, *outer: Value) -> list[Value]:
        a_base = f.at(a, f.mul(number, run.jump), hint="a")
        b_base = f.at(b, f.mul(number, run.length * b_stride), hint="b")

        def body(k: Int, *inner: Value) -> list[Value]:
            a_at = f.at(a_base, f.mul(k, run.k_stride), hint="a")
            b_at = f.at(b_base, f.mul(k, b_stride), hint="b")
            return terms(a_at, b_at, UNROLL, list(inner))

        values = f.loop(whole, body, step=UNROLL, carry=outer, index="k")
        rest = run.length - whole
        return terms(f.at(a_base, whole * run.k_stride), f.at(b_base, whole * b_stride), rest, values)

    return f.loop(run.repeats, repeat, carry=carried, index="panel")


def balanced(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """`rows` split into the fewest tiles of at most `max_rows` rows, of nearly equal height: [(tiles, rows per tile), ...]."""
    if rows <= 0:
        return []
    tiles = ceil_div(rows, max_rows)
    height, higher = divmod(rows, tiles)
    return [pair for pair in ((higher, height + 1), (tiles - higher, height)) if pair[0]]


def over_tiles(f: Function, first: int, last: int, max_rows: int, tile: Callable[[int, Int], None]) -> None:
    """Call `tile(rows, first row)` for balanced tiles that cover [first, last)."""
    for tiles, rows in balanced(last - first, max_rows):
        begin = first

        def body(number: Int, rows: int = rows, begin: int = begin) -> None:
            tile(rows, f.add(f.mul(number, rows), begin, "row"))

        f.loop(tiles, body, index="tile")
        first += tiles * rows


def over_panels(f: Function, panels: Sequence[tuple[int, int]], body: Callable[[Int, int], None]) -> None:
    """Call `body(first column, width)` for consecutive panels; a run-time loop covers neighbours of equal width."""
    start = 0
    while start < len(panels):
        width = panels[start][1]
        stop = start
        while stop < len(panels) and panels[stop][1] == width:
            stop += 1
        begin = panels[start][0]

        def one(number: Int, begin: int = begin, width: int = width) -> None:
            body(f.add(f.mul(number, width), begin, "column"), width)

        f.loop(stop - start, one, index="panel")
        start = stop
