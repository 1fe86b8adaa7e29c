"""The micro-kernel of all products: a tile whose accumulators stay in registers from the first term to the epilogue.

    acc[m][v] = start[m][v] + sum over k of  a[m, k] * b[k, v]

a is read one float at a time and broadcast, b one vector at a time. Every element is one chain of multiply-adds over k, so
the bits of a result do not depend on the shapes of the tiles.

Tiles have a few heights (`Target.heights`), and `cover` chooses how many of each. The last tile may have more rows than are
left: it computes them from whatever memory follows (`Plan.slack` leaves room) and does not store them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.integers import ceil_div

Accumulators = list[list[Value]]  # [row][vector]
TILE_FIELDS = "i64 panels, i64 tall, i64 middle, i64 low, i64 last_rows"
TILE_OVERHEAD = 0.5  # of a tile, in rows: its start and its epilogue


@functools.cache
def cover(rows: int, heights: tuple[int, ...]) -> dict[str, int]:
    """The tiles that cover `rows` rows at the least cost: how many are tall, middle and low, and the rows of the last one."""
    best: tuple[float, tuple[int, ...]] = (float("inf"), ())
    first = range(max(0, rows // heights[0] - 3), ceil_div(rows, heights[0]) + 1)
    for counts in itertools.product(first, *[range(5)] * (len(heights) - 1)):
        covered, smallest = _covered(counts, heights)
        if rows <= covered < rows + max(smallest, 1):
            best = min(best, (covered + TILE_OVERHEAD * sum(counts), counts))
    covered, smallest = _covered(best[1], heights)
    tall, middle, low = (*best[1], 0)[:3]
    return {"tall": tall, "middle": middle, "low": low, "last_rows": smallest - (covered - rows)}


def _covered(counts: tuple[int, ...], heights: tuple[int, ...]) -> tuple[int, int]:
    """(rows that so many tiles of these heights cover, the lowest height used)."""
    used = [(count, height) for count, height in zip(counts, heights, strict=True) if count]
    return sum(count * height for count, height in used), min((height for _, height in used), default=0)


def over_tiles(f: Function, vectors: int, tile: Callable[[int, Value, Value], None]) -> None:
    """Call `tile(height, first row, valid rows)` for every tile of the fields `tall`, `middle`, `low` and `last_rows`."""
    first: Int = 0
    following = [f.i64(f.add(f["middle"], f["low"])), f["low"], f.i64(0)]
    # There may be no low tiles.
    for height, field, rest in zip(f.target.heights(vectors), ("tall", "middle", "low"), following, strict=False):
        count, begin = f[field], first
        whole = f.compare("ne", rest, f.i64(0), "more")  # tiles of other heights follow
        last = f.select(whole, f.i64(-1), f.i64(f.sub(count, 1)), "last")

        def body(number: Int, height: int = height, begin: Int = begin, last: Value = last) -> None:
            is_last = f.compare("eq", f.i64(number), last, "is_last")
            valid = f.select(is_last, f["last_rows"], f.i64(height), "valid")
            tile(height, f.i64(f.add(f.mul(number, height), begin, "row")), valid)

        f.loop(count, body, index="tile")
        first = f.add(f.mul(count, height), first)


def accumulate(
    f: Function, vectors: int, length: Value, b: Value, carried: Sequence[Value], a: Callable[[Int], list[Value]]
) -> list[Value]:
    """Add `length` terms to the accumulators `carried`; `a(k)` has the addresses of a[0, k], a[1, k], ...

    One term per iteration: with 26 accumulators it has 47 instructions of which the processor issues four per cycle, and the
    multiply-adds take 13 cycles. More terms would only give LLVM loads to move ahead, for which there are no registers.
    """
    width = vectors * f.lanes

    def term(k: Int, *values: Value) -> list[Value]:
        b_row = [f.vload(b, f.add(f.mul(k, width), v * f.lanes), "b") for v in range(vectors)]
        total = list(values)
        for m, address in enumerate(a(k)):
            a_all = f.splat(f.load("float", address, hint="a"), "a")
            for v in range(vectors):
                total[m * vectors + v] = f.fma(a_all, b_row[v], total[m * vectors + v], "acc")
        return total

    return f.loop(length, term, carry=carried, index="k")


def epilogue(f: Function, carried: Sequence[Value], vectors: int, row: Callable[[int, Sequence[Value]], None]) -> None:
    """Call `row(m, vectors of the row)` for the rows below the argument `valid`."""
    rows = len(carried) // vectors
    label = f._fresh("done")
    for m in range(rows):
        row(m, carried[m * vectors : (m + 1) * vectors])
        if m + 1 < rows:
            f.leave_when(f.compare("eq", f["valid"], f.i64(m + 1), "done"), label)
    f.join(label)
