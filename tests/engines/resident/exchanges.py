"""How simulated blocks send values to each other and wait: slots, addresses and bytes as in `cuda/exchange.cuh`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.settings import K_TILE, N_TILE, ROW_TILE, WARPS
from tests.engines.resident.fragments import BYTES, Array, Clock, RaceError, Slots

Ready = Callable[[], bool]
Stamp = npt.NDArray[np.int64]
Piece = tuple[int, Array]  # offset in its slot, 8 x 8 numbers


class Wires:
    """The state between the blocks: memories, bytes that have arrived, flags."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.near = plan.blocks == 1 or plan.cluster
        self.shared = [Slots(plan.shared) for _ in range(plan.blocks)]
        self.far = Slots(plan.exchange)
        self.expected = [expected_bytes(plan, rank) for rank in range(plan.blocks)]
        self.received: defaultdict[tuple[int, int, int], int] = defaultdict(int)  # by block, exchange and use
        self.stamps: dict[tuple[int, int, int], Stamp] = {}
        self.flags: dict[tuple[int, int, int], Stamp] = {}  # by exchange, writer and use
        self.left: dict[tuple[int, int], int] = {}  # when a block left a pass, in its time
        self.fetched: defaultdict[int, set[int]] = defaultdict(set)  # by pass: blocks that have sent their rows to all

    def slots_of(self, rank: int) -> Slots:
        return self.shared[rank] if self.near else self.far

    def arrive(self, to: int, exchange: int, use: int, stamp: Stamp, size: int) -> None:
        key = to, exchange, use
        self.received[key] += size
        self.stamps[key] = np.maximum(self.stamps.get(key, stamp), stamp)


def expected_bytes(plan: Plan, rank: int) -> dict[int, int]:
    """Bytes that block `rank` waits for in each exchange, as in the generated source."""
    found = re.search(r"exchange_bytes\(unsigned i, unsigned rank\) { return (.*) : 0; }", plan.source())
    assert found is not None
    cases = (case.removeprefix("i == ").split(" ? ") for case in found[1].split(" : "))
    return {int(number): eval(size.replace("/", "//"), {"rank": rank}) for number, size in cases}


class Port:
    """A block's side of the exchanges. A number is divided evenly among its planes."""

    def __init__(self, wires: Wires, rank: int) -> None:
        self.wires, self.plan, self.rank = wires, wires.plan, rank
        self.clock = Clock(self.plan.blocks, rank)
        self.awaited: set[tuple[int, int]] = set()  # (exchange, use)

    def write(
        self, receivers: Iterable[int], name: str, exchange: int, use: int, pieces: Iterable[Piece], size: int = BYTES
    ) -> None:
        """Write into the slots of the receivers, `size` bytes per piece. In a grid all blocks read the same copy."""
        stamp = self.clock.tick()
        to = list(receivers) if self.wires.near else [self.rank]
        for offset, values in pieces:
            for rank in to:
                self.wires.slots_of(rank).write(name, offset, values, use, self.clock, size)
                self.wires.arrive(rank, exchange, use, stamp, size)

    def read(self, name: str, exchange: int, use: int, offset: int, warp: int) -> Array:
        awaited = not self.plan.cluster or (exchange, use) in self.awaited
        return self.wires.slots_of(self.rank).read(name, offset, use, self.clock, warp, awaited=awaited)

    # Left operands: rows by units, in k tiles of sixteen units.

    def left_offset(self, layer: Layer, plane: int, row_tile: int, tile: int, half: int) -> int:
        """`tile`: of eight units, among those of all blocks; `half`: of the row tile."""
        index = (plane * self.plan.row_tiles + row_tile) * layer.next_k_tiles + tile // 2
        return (index * 4 + tile % 2 * 2 + half) * BYTES

    def publish(
        self, layer: Layer, what: str, exchange: int, use: int, stride: int, rows: range, values: Array
    ) -> None:
        """Send this block's units of these row tiles to all blocks."""
        spread = values / self.plan.planes

        def pieces() -> Iterator[Piece]:
            for plane, (i, row_tile), n, half in _all(
                range(self.plan.planes), enumerate(rows), range(layer.n_tiles), (0, 1)
            ):
                tile = self.rank * layer.n_tiles + n
                offset = (use & 1) * stride + self.left_offset(layer, plane, row_tile, tile, half)
                yield offset, spread[i * ROW_TILE + half * N_TILE :][:N_TILE, n * N_TILE :][:, :N_TILE]

        self.write(range(self.plan.blocks), f"layer {layer.index}: {what}", exchange, use, pieces())

    def read_left(self, layer: Layer, what: str, exchange: int, use: int, stride: int, rows: range) -> Array:
        """The units of all blocks, of these row tiles. The k tile of a unit determines which warp reads it."""
        found = np.zeros((len(rows) * ROW_TILE, layer.next_k_tiles * K_TILE))
        tiles, name = range(layer.n_tiles * self.plan.blocks), f"layer {layer.index}: {what}"
        for plane, (i, row_tile), tile, half in _all(range(self.plan.planes), enumerate(rows), tiles, (0, 1)):
            offset = (use & 1) * stride + self.left_offset(layer, plane, row_tile, tile, half)
            values = self.read(name, exchange, use, offset, tile // 2 % WARPS)
            found[i * ROW_TILE + half * N_TILE :][:N_TILE, tile * N_TILE :][:, :N_TILE] += values
        return found

    # Waiting.

    def raise_flag(self, exchange: int, use: int) -> None:
        self.clock.meet()
        self.wires.flags[exchange, self.rank, use] = self.clock.tick()

    def wait(self, exchange: int, use: int, layer: Layer) -> Iterator[Ready]:
        """Wait for all bytes of a use of an exchange; in a grid, a warp waits for the writers of what it reads."""
        if self.plan.cluster:
            yield from self._wait_for_bytes(exchange, use)
        elif self.plan.blocks > 1:
            yield from self._wait_for_flags(exchange, use, layer)

    def _wait_for_bytes(self, exchange: int, use: int) -> Iterator[Ready]:
        wires, key = self.wires, (self.rank, exchange, use)
        expected = wires.expected[self.rank][exchange]
        yield lambda: wires.received[key] >= expected
        if wires.received[key] > expected:
            raise RaceError(f"exchange {exchange}, use {use}: more bytes arrived than are expected")
        if key in wires.stamps:  # a block that expects nothing receives nothing
            self.clock.learn(wires.stamps[key])
        self.awaited.add((exchange, use))

    def _wait_for_flags(self, exchange: int, use: int, layer: Layer) -> Iterator[Ready]:
        flags = self.wires.flags
        for warp in range(WARPS):
            k_tiles = range(warp, layer.next_k_tiles, WARPS)
            for writer in sorted({(k_tile * 2 + odd) // layer.n_tiles for k_tile in k_tiles for odd in (0, 1)}):
                if writer < self.plan.blocks:
                    key = exchange, writer, use
                    yield lambda key=key: key in flags  # type: ignore[misc]
                    self.clock.learn(flags[key], warp)


def _all(
    first: range, second: Iterable[tuple[int, int]], third: range, fourth: tuple[int, int]
) -> Iterator[tuple[int, tuple[int, int], int, int]]:
    pairs = list(second)
    return ((a, b, c, d) for a in first for b in pairs for c in third for d in fourth)
