"""The one micro-kernel: a tile of a product, its accumulators in registers from the first term to the epilogue.

    acc[m][v] = start[m][v] + sum over k of  a[m, k] * b[k, v]

a is read one float at a time and broadcast, b one vector at a time. All strides are constants, so each of a tile's rows is
the same base register with another displacement. `finish` gets the accumulators and stores what it makes of them: bias and
activation are in the start and the finish of the forward, the optimizer's update is the finish of dW.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value

Accumulators = list[list[Value]]  # [row][vector]
UNROLL = 4
TILE_PARAMETERS = "ptr %a, ptr %a2, ptr %b, ptr %c, ptr %extra"


@dataclass(frozen=True)
class Run:
    """A stretch of k: `repeats` times `length` terms, a's base advancing by `jump` from one repeat to the next."""

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
    module: Module,
    name: str,
    *,
    rows: int,
    vectors: int,
    runs: Sequence[Run],
    b_stride: int,
    start: Callable[[Function], Accumulators] | None = None,
    finish: Callable[[Function, Accumulators], None],
    before: Callable[[Function], None] | None = None,
) -> str:
    """The function `tile(a, a2, b, c, extra)`; the first of `runs` reads a, the second, if there is one, a2."""
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
        finish(f, [carried[row * vectors : (row + 1) * vectors] for row in range(rows)])

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


def balanced(rows: int, most: int) -> list[tuple[int, int]]:
    """`rows` cut into as few tiles of at most `most` rows as can be, nearly equal: [(tiles, rows a tile), ...]."""
    if rows <= 0:
        return []
    tiles = -(-rows // most)
    least, larger = divmod(rows, tiles)
    return [pair for pair in ((larger, least + 1), (tiles - larger, least)) if pair[0]]


def over_tiles(f: Function, first: int, last: int, most: int, tile: Callable[[int, Int], None]) -> None:
    """Call `tile(rows, first row)` for balanced tiles that cover [first, last)."""
    for tiles, rows in balanced(last - first, most):
        begin = first

        def body(number: Int, rows: int = rows, begin: int = begin) -> None:
            tile(rows, f.add(f.mul(number, rows), begin, "row"))

        f.loop(tiles, body, index="tile")
        first += tiles * rows


def over_panels(f: Function, panels: Sequence[tuple[int, int]], body: Callable[[Int, int], None]) -> None:
    """Call `body(first column, width)` for consecutive panels; those of equal width share one run-time loop."""
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
