"""Memory that detects races: exchanged values in fragments of 8 x 8 numbers, at the addresses of the plan.

A fragment records its writer, the use of its exchange, and its readers since then. Events are ordered by vector clocks: block a
is after an event of block b only if a chain of writes and waits leads from that event to a. So one run finds every race,
whatever the order in which the blocks happened to run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onelaunch.engines.resident.plan.layers import Memory
from onelaunch.engines.resident.plan.settings import WARPS

Array = npt.NDArray[np.float64]
SIDE = 8  # numbers along a fragment
BYTES = 128  # of a fragment of 16-bit numbers


class RaceError(AssertionError):
    """The plan lets a block read or write what it must not, or wait for something that never comes."""


class Clock:
    """What a block knows of the other blocks' time. In a grid each warp waits alone; `meet` is the barrier of the block."""

    def __init__(self, blocks: int, rank: int) -> None:
        self.rank = rank
        self.warps = np.zeros((WARPS, blocks), dtype=np.int64)

    @property
    def now(self) -> int:
        return int(self.warps[0, self.rank])

    def tick(self) -> npt.NDArray[np.int64]:
        """Advance the time. Returns what another block learns from a write made now."""
        self.warps[:, self.rank] += 1
        return self.warps.max(axis=0)

    def learn(self, stamp: npt.NDArray[np.int64], warp: int | None = None) -> None:
        rows = slice(None) if warp is None else warp
        self.warps[rows] = np.maximum(self.warps[rows], stamp)

    def meet(self) -> None:
        self.warps[:] = self.warps.max(axis=0)


@dataclass
class Fragment:
    values: Array
    use: int
    writer: int
    written: int  # in the writer's time
    reads: dict[int, int] = field(default_factory=dict)  # by block, in its time


class Slots:
    """One address space: the shared memory of a block, or global memory."""

    def __init__(self, regions: Memory) -> None:
        self.regions = regions
        self.fragments: dict[int, Fragment] = {}

    def address(self, name: str, offset: int, size: int) -> int:
        region = self.regions.regions[name]
        if not 0 <= offset <= region.bytes - size:
            raise RaceError(f"{name}: {offset} is outside its {region.bytes} bytes")
        return region.offset + offset

    def write(self, name: str, offset: int, values: Array, use: int, clock: Clock, size: int = BYTES) -> None:
        address = self.address(name, offset, size)
        old = self.fragments.get(address)
        if old is not None:
            if old.writer != clock.rank or old.use == use:
                raise RaceError(f"{name}, use {use}: blocks {old.writer} and {clock.rank} both write address {address}")
            known = clock.warps.max(axis=0)
            for reader, time in old.reads.items():
                if reader != clock.rank and time >= known[reader]:
                    raise RaceError(f"{name}, use {use}: block {clock.rank} writes what block {reader} may still read")
        self.fragments[address] = Fragment(values.copy(), use, clock.rank, clock.now)

    def read(self, name: str, offset: int, use: int, clock: Clock, warp: int, *, awaited: bool = True) -> Array:
        """`awaited`: whether the block has waited for this exchange. Stores into another block's memory need it: they are
        not ordered among themselves."""
        address = self.address(name, offset, 0)
        found = self.fragments.get(address)
        if found is None or found.use != use:
            there = "nothing" if found is None else f"use {found.use}"
            raise RaceError(f"{name}: block {clock.rank} reads use {use} and finds {there}")
        unknown = found.writer != clock.rank and found.written > clock.warps[warp, found.writer]
        if unknown or not awaited:
            raise RaceError(f"{name}, use {use}: block {clock.rank} has not waited for block {found.writer}")
        found.reads[clock.rank] = clock.now
        return found.values
