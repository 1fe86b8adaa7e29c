"""Where every buffer of a run lies: one arena, laid out by lifetime before the first step. Pure arithmetic, no device.

Two buffers may share bytes when no moment needs both. `plan` places them one after another, each at the lowest offset where
it meets no living neighbour (first fit). The order decides how tight it gets: several are tried, and in each the buffer that
sticks out at the top is moved to the front as long as that helps; then buffers of the best one are moved about at random, by
numbers that are always the same. No layout is below `lower_bound`, the most bytes alive at one moment; one that comes close
to it ends the search, and so does a number of steps, so that a thousand buffers take seconds.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 256  # what cudaMalloc gives, and what every vector load wants
IMPROVEMENTS = 200  # rounds an order
MOVES = 2000  # at random
CLOSE = 1.01  # times the lower bound: not worth more of them
SLACK = 0.01  # by which a random move may make it worse, at first
PAIRS = 10_000_000  # of buffers that an order's rounds, or all random moves, may look at: a second or two


@dataclass(frozen=True)
class Buffer:
    """`nbytes` that must stay untouched from moment `first` to moment `last`, both included."""

    name: str
    nbytes: int
    first: int
    last: int

    def meets(self, other: Buffer) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Layout:
    """`offsets` are in the order of the buffers."""

    buffers: tuple[Buffer, ...]
    offsets: Mapping[str, int]
    nbytes: int

    @property
    def lower_bound(self) -> int:
        return lower_bound(self.buffers)

    def __str__(self) -> str:
        apart = sum(_aligned(buffer.nbytes) for buffer in self.buffers)
        return f"{len(self.buffers)} buffers in one arena of {self.nbytes:,} bytes ({apart:,} apart)"


def lifetimes(sizes: Mapping[str, int], uses: Sequence[Iterable[str]], kept: Iterable[str] = ()) -> list[Buffer]:
    """Buffers from what each moment of a step touches; those in `kept` live all the time, as weights do."""
    whole = set(kept)
    moments: dict[str, list[int]] = {name: [0, len(uses) - 1] for name in sizes if name in whole}
    for moment, names in enumerate(uses):
        for name in names:
            moments.setdefault(name, [moment, moment])[1] = len(uses) - 1 if name in whole else moment
    return [Buffer(name, nbytes, *moments[name]) for name, nbytes in sizes.items() if name in moments]


def _alive(buffers: Iterable[Buffer]) -> dict[int, int]:
    """The bytes alive from each moment on at which that changes."""
    changes: dict[int, int] = {}
    for buffer in buffers:
        changes[buffer.first] = changes.get(buffer.first, 0) + _aligned(buffer.nbytes)
        changes[buffer.last + 1] = changes.get(buffer.last + 1, 0) - _aligned(buffer.nbytes)
    moments = sorted(changes)
    return dict(zip(moments, accumulate(changes[moment] for moment in moments), strict=True))


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """The most bytes alive at one moment: no layout is smaller."""
    return max(_alive(buffers).values(), default=0)


def plan(buffers: Iterable[Buffer]) -> Layout:
    """Place every buffer; the same buffers give the same layout."""
    given = tuple(buffers)
    names = [buffer.name for buffer in given]
    if len(set(names)) != len(names) or any(b.nbytes < 0 or b.first > b.last for b in given):
        raise ValueError("buffers have a name each, no fewer than 0 bytes, and end when they begin or later")
    needed = [buffer for buffer in given if buffer.nbytes]
    bound = lower_bound(needed)
    best: Placed | None = None
    for order in _orders(needed):
        found = _improved((*_first_fit(order), order), bound)
        if best is None or found[0] < best[0]:
            best = found
        if found[0] == bound:
            break
    assert best is not None
    total, offsets, order = _shaken(best, bound)
    places = {buffer.name: offset for buffer, offset in zip(order, offsets, strict=True)}
    return Layout(given, {name: places.get(name, 0) for name in names}, total)


# Ties are broken by name, so that a layout does not depend on the order in which buffers were listed.
_ORDERS: tuple[Callable[[Buffer], tuple[int, int, str]], ...] = (
    lambda b: (-b.nbytes, b.first, b.name),
    lambda b: (-(b.last - b.first), -b.nbytes, b.name),
    lambda b: (-b.nbytes * (b.last - b.first + 1), b.first, b.name),
    lambda b: (b.first, -b.nbytes, b.name),
    lambda b: (-b.last, -b.nbytes, b.name),
)


def _orders(buffers: list[Buffer]) -> Iterator[list[Buffer]]:
    for key in _ORDERS:
        yield sorted(buffers, key=key)
    yield _crowded_first(buffers)


def _crowded_first(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Those that live when the most bytes are alive, the longest first: where it is tight nothing lies in the way."""
    alive = _alive(buffers)
    most = {b.name: max(n for moment, n in alive.items() if b.first <= moment <= b.last) for b in buffers}
    return sorted(buffers, key=lambda b: (-most[b.name], b.first - b.last, -b.nbytes, b.name))


Placed = tuple[int, list[int], list[Buffer]]  # bytes in all, offsets, and the buffers in the order they were placed


def _rounds(most: int, order: list[Buffer]) -> int:
    return min(most, PAIRS // max(1, len(order) ** 2) + 1)


def _improved(placed: Placed, bound: int) -> Placed:
    """Moves a buffer that reaches the top to the front; one that did not help is not tried again from the same layout."""
    total, offsets, order = placed
    tried: set[str] = set()
    for _ in range(_rounds(IMPROVEMENTS, order)):
        if total <= bound:
            break
        tops = [
            buffer
            for buffer, offset in zip(order, offsets, strict=True)
            if offset + _aligned(buffer.nbytes) == total and buffer.name not in tried
        ]
        if not tops:
            # The top itself is stuck: move what lies highest below it and has not been tried.
            rest = [pair for pair in zip(offsets, order, strict=True) if pair[1].name not in tried]
            if not rest:
                break
            tops = [max(rest, key=lambda pair: (pair[0], pair[1].name))[1]]
        moved = tops[0]
        tried.add(moved.name)
        candidate = [moved, *(buffer for buffer in order if buffer is not moved)]
        new_total, new_offsets = _first_fit(candidate)
        if new_total < total:
            total, offsets, order = new_total, new_offsets, candidate
            tried.clear()
    return total, offsets, order


def _shaken(placed: Placed, bound: int) -> Placed:
    """Moves a buffer, every other time one that reaches the top, to a random place of the order, unless that makes it worse by
    more than a slack which dwindles."""
    total, offsets, order = best = placed
    draw = random.Random(len(order))
    moves = _rounds(MOVES, order)
    for move in range(moves):
        if best[0] <= CLOSE * bound:
            break
        tops = [at for at, b in enumerate(order) if offsets[at] + _aligned(b.nbytes) == total]
        candidate = list(order)
        moved = candidate.pop(draw.choice(tops) if move % 2 else draw.randrange(len(order)))
        candidate.insert(draw.randrange(len(order)), moved)
        new_total, new_offsets = _first_fit(candidate)
        if new_total <= total * (1 + SLACK * (1 - move / moves)):
            total, offsets, order = new_total, new_offsets, candidate
        if total < best[0]:
            best = (total, offsets, order)
    return best


def _first_fit(order: Sequence[Buffer]) -> tuple[int, list[int]]:
    placed: list[tuple[int, int, int, Buffer]] = []  # (offset, end, number, buffer), by offset
    offsets: list[int] = []
    total = 0
    for buffer in order:
        size, offset = _aligned(buffer.nbytes), 0
        for start, end, _, other in placed:
            if start >= offset + size:
                break
            if end > offset and buffer.meets(other):
                offset = end
        insort(placed, (offset, offset + size, len(placed), buffer))
        offsets.append(offset)
        total = max(total, offset + size)
    return total, offsets


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
