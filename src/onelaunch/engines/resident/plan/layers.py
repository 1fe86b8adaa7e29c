"""The parts of a plan: a block's part of a layer, and memory in named regions."""

from __future__ import annotations

from dataclasses import dataclass, field

from onelaunch.engines.resident.plan.settings import N_TILE, WARPS
from onelaunch.engines.resident.plan.stages import Stage
from onelaunch.integers import ceil_div, clamp, round_up

REGION_ALIGNMENT = 128  # bytes


@dataclass(frozen=True)
class Layer:
    """A Linear and what follows it, cut into tiles of K_TILE inputs by N_TILE units."""

    index: int
    stage: Stage
    first: bool
    last: bool  # every block computes it whole
    k_tiles: int  # of the inputs
    n_tiles: int  # of the units of one block
    blocks: int
    input_tiles: int  # of N_TILE inputs that a block owns as units of the layer before
    masters_shared: bool = False
    register_states: int = 0  # optimizer states in registers; the others are in shared memory
    streamed_tiles: int = 0  # of the latter's tiles, the last ones, in device memory

    @property
    def k_tiles_per_warp(self) -> int:
        return ceil_div(self.k_tiles, WARPS)

    @property
    def split_k(self) -> int:
        """Warps whose partial sums are added up."""
        return min(WARPS, self.k_tiles)

    @property
    def units(self) -> int:
        """Units of one block, padding included."""
        return self.n_tiles * N_TILE

    @property
    def next_k_tiles(self) -> int:
        """k tiles that the units of all blocks make for the next layer."""
        return ceil_div(self.n_tiles * (1 if self.last else self.blocks), 2)

    @property
    def owned_by_input(self) -> bool:
        """Whether a block owns the weights of its own inputs: so it is in the last layer, after a hidden one."""
        return self.last and not self.first

    def streamed_of(self, state: int, states: int) -> int:
        """Tiles of optimizer state `state` (of `states`) that are in device memory, the last ones."""
        after = (states - 1 - state) * self.weight_tiles
        return clamp(0, self.streamed_tiles - after, self.weight_tiles) if state >= self.register_states else 0

    @property
    def weight_tiles(self) -> int:
        """fp32 tiles of weights that a warp owns."""
        if self.owned_by_input:
            return ceil_div(ceil_div(self.input_tiles, 2) * self.n_tiles, WARPS)
        return self.k_tiles_per_warp * self.n_tiles


@dataclass(frozen=True)
class Region:
    name: str
    offset: int
    bytes: int


@dataclass
class Memory:
    """Regions, one after another."""

    regions: dict[str, Region] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, size: int) -> None:
        assert name not in self.regions, name
        self.regions[name] = Region(name, self.size, size)
        self.size += round_up(size, REGION_ALIGNMENT)

    def __getitem__(self, name: str) -> int:
        """The offset of a region in bytes."""
        return self.regions[name].offset
