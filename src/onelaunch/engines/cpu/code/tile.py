"""The micro-kernel of all products: a tile whose accumulators stay in registers from the first term to the epilogue.

    acc[m][v] = start[m][v] + sum over k of  a[m, k] * b[k, v]

b is read one vector at a time, and each multiply-add has one value of a in all lanes. Every element is one chain of
multiply-adds over k, so the bits of a result do not depend on the shapes of the tiles.

Tiles have a few heights (`Target.heights`), and `cover` chooses how many of each. The last tile may have more rows than are
left: it computes them from whatever memory follows (`Plan.slack` leaves room) and does not store them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Int, Value

Accumulators = list[list[Value]]  # [row][vector]
COUNTS = ("tall", "middle", "low")  # fields: how many tiles of each height
TILE_FIELDS = f"i64 panels, i64 first, {', '.join(f'i64 {name}' for name in COUNTS)}, i64 last_rows"
UNROLL = {
    1: 2,
    2: 4,
}  # terms per iteration, by vectors per panel: narrow panels are rare, and code takes time to compile
TILES = "i64 %tiles, i64 %first_row, i64 %last_rows"  # parameters of a function for tiles of one height
TILE_OVERHEAD = 0.5  # of a tile, in rows: its start and its epilogue


@functools.cache
def cover(first: int, last: int, heights: tuple[int, ...]) -> dict[str, int]:
    """The fields of tiles that cover the rows [first, last) at the least cost: how many there are of each height, and the rows
    of the last one."""
    rows = last - first
    # A long way from the end, tall tiles are best.
    tall = max(0, rows // heights[0] - heights[0])
    counts = list(_cheapest(heights)[rows - tall * heights[0]])
    counts[0] += tall
    covered = sum(count * height for count, height in zip(counts, heights, strict=True))
    lowest = min((height for count, height in zip(counts, heights, strict=True) if count), default=0)
    named = dict.fromkeys(COUNTS, 0) | dict(zip(COUNTS, counts, strict=False))
    return {"first": first, **named, "last_rows": lowest - (covered - rows)}


@functools.cache
def _cheapest(heights: tuple[int, ...]) -> list[tuple[int, ...]]:
    """By a number of rows: the counts of tiles that cover so many at the least cost."""
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,) * len(heights))]
    for rows in range(1, heights[0] * (heights[0] + 1)):
        choices = []
        for position, height in enumerate(heights):
            cost, counts = best[max(0, rows - height)]
            more = (*counts[:position], counts[position] + 1, *counts[position + 1 :])
            choices.append((cost + height + TILE_OVERHEAD, more))
        best.append(min(choices))
    return [counts for _, counts in best]


def over_heights(f: Function, heights: tuple[int, ...], call: Callable[[int, Sequence[Int]], None]) -> None:
    """Call `call(height, arguments)` for the heights of the fields COUNTS that have tiles. The arguments are those of TILES:
    how many tiles, the first row, and the rows of the last one."""
    first: Int = f["first"]
    following: list[Value] = [f.i64(0)]  # tiles after those of each height
    for field in reversed(COUNTS[1 : len(heights)]):
        following.insert(0, f.i64(f.add(f[field], following[0])))
    for height, field, rest in zip(heights, COUNTS, following, strict=False):
        count, begin = f[field], first
        is_last = f.compare("eq", rest, f.i64(0), "is_last")
        last_rows = f.select(is_last, f["last_rows"], f.i64(height), "last_rows")
        f.when(
            f.compare("ne", count, f.i64(0), "any"),
            lambda height=height, arguments=(count, begin, last_rows): call(height, arguments),  # type: ignore[misc]
        )
        first = f.add(f.mul(count, height), first)


def over_tiles(f: Function, height: int, tile: Callable[[Value, Value], None]) -> None:
    """Call `tile(first row, valid rows)` for the tiles of the arguments TILES."""
    last = f.sub(f["tiles"], 1)

    def body(number: Int) -> None:
        is_last = f.compare("eq", f.i64(number), f.i64(last), "is_last")
        valid = f.select(is_last, f["last_rows"], f.i64(height), "valid")
        tile(f.i64(f.add(f.mul(number, height), f["first_row"], "row")), valid)

    f.loop(f["tiles"], body, index="tile")


def accumulate(
    f: Function, vectors: int, length: Value, b: Value, carried: Sequence[Value], a: Sequence[Value], step: Int,
    rows: Callable[[Sequence[Value]], list[Value]], *, adjacent_rows: bool = False,
) -> list[Value]:  # fmt: skip
    """Add `length` terms to the accumulators `carried`.

    `a` has addresses that advance by `step` bytes per term; `rows` computes those of a[0, k], a[1, k], ... from them. Each is
    one instruction's operand (base, index, displacement). LLVM must not know how the addresses advance, or it would keep one
    per row, for which there are no registers. Nor may it move loads of one term into another, for the same reason.

    On targets with lane operands a is read in vectors: of several terms of one row, or of one term of `adjacent_rows`.
    """
    width = vectors * f.lanes
    by_lanes = f.target.has_lane_operands
    unroll = f.lanes if by_lanes else UNROLL[vectors]
    ahead = 2 if f.target.registers >= 32 else 1  # terms whose row of b is loaded at a time: b comes from L2

    def add_row(total: list[Value], m: int, a_all: Value, b_row: Sequence[Value]) -> None:
        for v in range(vectors):
            total[m * vectors + v] = f.fma(a_all, b_row[v], total[m * vectors + v], "acc")

    def term(number: int, a_now: Sequence[Value], b_row: Sequence[Value], total: list[Value]) -> None:
        addresses = rows([f.at(pointer, f.mul(number, step), "i8", "term") for pointer in a_now])
        if by_lanes and adjacent_rows:
            columns = [f.vload(address, hint="a") for address in addresses[:: f.lanes]]
        for m, address in enumerate(addresses):
            if by_lanes and adjacent_rows:
                a_all = f.lane(columns[m // f.lanes], m % f.lanes, "a")
            else:
                a_all = f.splat(f.load("float", address, hint="a"), "a")
            add_row(total, m, a_all, b_row)

    def terms_in_vectors(a_now: Sequence[Value], b_rows: Sequence[Sequence[Value]], total: list[Value]) -> None:
        """As many terms as a vector has lanes, two rows at a time."""
        addresses = rows(a_now)
        for first in range(0, len(addresses), 2):
            pair = [f.vload(address, hint="a") for address in addresses[first : first + 2]]
            for number, b_row in enumerate(b_rows):
                for m, a_row in enumerate(pair, first):
                    add_row(total, m, f.lane(a_row, number, "a"), b_row)

    def terms(count: int, moving: Sequence[Value]) -> list[Value]:
        pointers, total = moving[: len(a) + 1], list(moving[len(a) + 1 :])
        *a_now, b_now = pointers
        b_rows: list[list[Value]] = []

        def load_b(rows: int) -> None:
            f.keep_order()
            while len(b_rows) < rows:
                b_rows.append([f.vload(b_now, len(b_rows) * width + v * f.lanes, "b") for v in range(vectors)])
            f.keep_order()

        if by_lanes and not adjacent_rows and count == unroll:
            load_b(count)
            terms_in_vectors(a_now, b_rows, total)
        else:
            for number in range(count):
                load_b(min(count, number + ahead))
                term(number, a_now, b_rows[number], total)
        following = [f.at(pointer, f.mul(count, step), "i8", "next") for pointer in a_now]
        following.append(f.at(b_now, count * width))
        return [f.opaque(pointer, "a") for pointer in following] + total

    whole = f.op("i64", f"and i64 {length.text}, {-unroll}", "whole")
    moving = f.loop(whole, lambda _, *now: terms(unroll, now), step=unroll, carry=[*a, b, *carried], index="k")
    moving = f.loop(length, lambda _, *now: terms(1, now), start=whole, carry=moving, index="k")
    return moving[len(a) + 1 :]


def epilogue(
    f: Function, carried: Sequence[Value], vectors: int, valid: Value, spare: Value,
    row: Callable[[Int, Sequence[Value]], None],
) -> None:  # fmt: skip
    """Call `row(m, vectors of the row)` for the first `valid` rows; `spare` is memory for the accumulators.

    A tile with all its rows is straight-line code; a loop covers the rows of others.
    """
    rows, width = len(carried) // vectors, vectors * f.lanes

    def whole() -> None:
        for m in range(rows):
            row(m, carried[m * vectors : (m + 1) * vectors])

    def part() -> None:
        for n, value in enumerate(carried):
            f.store(value, spare, n * f.lanes)

        def one(m: Int) -> None:
            row(m, [f.vload(spare, f.add(f.mul(m, width), v * f.lanes)) for v in range(vectors)])

        f.loop(valid, one, index="row")

    f.either(f.compare("eq", valid, f.i64(rows), "whole"), whole, part)
