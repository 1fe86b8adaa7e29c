"""How simulated blocks hand values to each other and wait: slots, addresses and bytes as in `cuda/exchange.cuh`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.settings import ROW_TILE, STEP, TILE, WARPS
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.source.source import source_of
from tests.engines.resident.fragments import BYTES, Array, Clock, RaceError, Slots

Ready = Callable[[], bool]
Stamp = npt.NDArray[np.int64]
Piece = tuple[int, Array]  # offset in its slot, 8 x 8 numbers


class Wires:
    """What lies between the blocks: memories, bytes that arrived, flags."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.near = plan.blocks == 1 or plan.cluster
        self.shared = [Slots(plan.shared) for _ in range(plan.blocks)]
        self.far = Slots(plan.exchange)
        self.expected = [expected_bytes(plan, rank) for rank in range(plan.blocks)]
        self.received: defaultdict[tuple[int, int, int], int] = defaultdict(int)  # by block, exchange and use
        self.stamps: dict[tuple[int, int, int], Stamp] = {}
        self.flags: dict[tuple[int, int, int], Stamp] = {}  # by exchange, writer and use
        self.left: dict[tuple[int, int], int] = {}  # when a block had left a pass, by its clock
        self.fetched: defaultdict[int, set[int]] = defaultdict(
            set
        )  # by pass: whose share of the rows is on its way to all

    def slots_of(self, rank: int) -> Slots:
        return self.shared[rank] if self.near else self.far

    def arrive(self, to: int, exchange: int, use: int, stamp: Stamp, size: int) -> None:
        key = to, exchange, use
        self.received[key] += size
        self.stamps[key] = np.maximum(self.stamps.get(key, stamp), stamp)


def expected_bytes(plan: Plan, rank: int) -> dict[int, int]:
    """What block `rank` waits for in each exchange, as the source says it."""
    found = re.search(r"exchange_bytes\(unsigned i, unsigned rank\) { return (.*) : 0; }", source_of(plan))
    assert found is not None
    cases = (case.removeprefix("i == ").split(" ? ") for case in found[1].split(" : "))
    return {int(number): eval(size.replace("/", "//"), {"rank": rank}) for number, size in cases}


class Port:
    """A block's side of the exchanges. A number split into planes is spread evenly over them."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.plan, self.rank = wires, wires.plan, rank
        self.clock = Clock(self.plan.blocks, rank)
        self.awaited: set[tuple[int, int]] = set()  # (exchange, use)

    def write(
        self, receivers: Iterable[int], name: str, exchange: int, use: int, pieces: Iterable[Piece], size: int = BYTES
    ) -> None:
        """Into the slots of these blocks, `size` bytes a piece; in a grid everyone reads the one copy."""
        stamp = self.clock.tick()
        to = list(receivers) if self.wires.near else [self.rank]
        for offset, values in pieces:
            for rank in to:
                self.wires.slots_of(rank).write(name, offset, values, use, self.clock, size)
                self.wires.arrive(rank, exchange, use, stamp, size)

    def read(self, name: str, exchange: int, use: int, offset: int, warp: int) -> Array:
        awaited = not self.plan.cluster or (exchange, use) in self.awaited
        return self.wires.slots_of(self.rank).read(name, offset, use, self.clock, warp, awaited=awaited)

    # Left operands: rows by units, in steps of sixteen units.

    def left_offset(self, layer: Layer, plane: int, row_tile: int, place: int, half: int) -> int:
        """`place`: of a tile of units among all; `half`: of the row tile."""
        index = (plane * self.plan.row_tiles + row_tile) * layer.output_steps + place // 2
        return (index * 4 + place % 2 * 2 + half) * BYTES

    def publish(
        self, layer: Layer, what: str, exchange: int, use: int, stride: int, rows: range, values: Array
    ) -> None:
        """This block's units, of these row tiles, for everyone."""
        spread = values / self.plan.planes

        def pieces() -> Iterator[Piece]:
            for plane, (i, row_tile), n, half in _all(
                range(self.plan.planes), enumerate(rows), range(layer.tiles), (0, 1)
            ):
                place = self.rank * layer.tiles + n
                offset = (use & 1) * stride + self.left_offset(layer, plane, row_tile, place, half)
                yield offset, spread[i * ROW_TILE + half * TILE :][:TILE, n * TILE :][:, :TILE]

        self.write(range(self.plan.blocks), f"layer {layer.index}: {what}", exchange, use, pieces())

    def read_left(self, layer: Layer, what: str, exchange: int, use: int, stride: int, rows: range) -> Array:
        """Everyone's units, of these row tiles; the step of a unit decides which warp reads it."""
        found = np.zeros((len(rows) * ROW_TILE, layer.output_steps * STEP))
        places, name = range(layer.tiles * self.plan.blocks), f"layer {layer.index}: {what}"
        for plane, (i, row_tile), place, half in _all(range(self.plan.planes), enumerate(rows), places, (0, 1)):
            offset = (use & 1) * stride + self.left_offset(layer, plane, row_tile, place, half)
            values = self.read(name, exchange, use, offset, place // 2 % WARPS)
            found[i * ROW_TILE + half * TILE :][:TILE, place * TILE :][:, :TILE] += values
        return found

    # Waiting.

    def raise_flag(self, exchange: int, use: int) -> None:
        self.clock.meet()
        self.wires.flags[exchange, self.rank, use] = self.clock.tick()

    def wait(self, exchange: int, use: int, layer: Layer) -> Iterator[Ready]:
        """Until every byte of a use of an exchange is here; in a grid a warp waits for the writers of what it reads."""
        if self.plan.cluster:
            yield from self._wait_for_bytes(exchange, use)
        elif self.plan.blocks > 1:
            yield from self._wait_for_flags(exchange, use, layer)

    def _wait_for_bytes(self, exchange: int, use: int) -> Iterator[Ready]:
        wires, key = self.wires, (self.rank, exchange, use)
        expected = wires.expected[self.rank][exchange]
        yield lambda: wires.received[key] >= expected
        if wires.received[key] > expected:
            raise RaceError(f"exchange {exchange}, use {use}: more bytes came than are waited for")
        if key in wires.stamps:  # nothing is sent to who expects nothing
            self.clock.learn(wires.stamps[key])
        self.awaited.add((exchange, use))

    def _wait_for_flags(self, exchange: int, use: int, layer: Layer) -> Iterator[Ready]:
        flags = self.wires.flags
        for warp in range(WARPS):
            steps = range(warp, layer.output_steps, WARPS)
            for writer in sorted({(step * 2 + odd) // layer.tiles for step in steps for odd in (0, 1)}):
                if writer < self.plan.blocks:
                    key = exchange, writer, use
                    yield lambda key=key: key in flags  # type: ignore[misc]
                    self.clock.learn(flags[key], warp)


def _all(
    first: range, second: Iterable[tuple[int, int]], third: range, fourth: tuple[int, int]
) -> Iterator[tuple[int, tuple[int, int], int, int]]:
    pairs = list(second)
    return ((a, b, c, d) for a in first for b in pairs for c in third for d in fourth)
