"""What a plan is made of: a layer's share of a block, and memory in named regions."""

from __future__ import annotations

from dataclasses import dataclass, field

from onelaunch.engines.resident.plan.settings import TILE, WARPS
from onelaunch.engines.resident.plan.stages import Stage


@dataclass(frozen=True)
class Layer:
    index: int
    stage: Stage
    first: bool
    last: bool  # every block computes it whole
    steps: int  # of sixteen inputs
    tiles: int  # of eight units a block
    blocks: int
    input_tiles: int  # of eight inputs that a block owns as units of the layer before
    masters_shared: bool = False
    states_shared: bool = True

    @property
    def steps_a_warp(self) -> int:
        return -(-self.steps // WARPS)

    @property
    def split(self) -> int:
        return min(WARPS, self.steps)

    @property
    def units(self) -> int:
        return self.tiles * TILE

    @property
    def output_steps(self) -> int:
        """Of sixteen units, over all blocks."""
        return -(-self.tiles * (1 if self.last else self.blocks) // 2)

    @property
    def owned_by_input(self) -> bool:
        """The last layer after a hidden one: a block owns the weights of its own inputs, and all get copies."""
        return self.last and not self.first

    @property
    def weight_tiles(self) -> int:
        """fp32 tiles a thread takes part in."""
        if self.owned_by_input:
            return -(-(-(-self.input_tiles // 2) * self.tiles) // WARPS)
        return self.steps_a_warp * self.tiles


@dataclass(frozen=True)
class Region:
    name: str
    offset: int
    bytes: int


@dataclass
class Memory:
    """Regions laid one after another, each aligned to its first lane's widest access."""

    regions: dict[str, Region] = field(default_factory=dict)
    size: int = 0

    def add(self, name: str, size: int) -> None:
        assert name not in self.regions, name
        self.regions[name] = Region(name, self.size, size)
        self.size += -(-size // 128) * 128

    def __getitem__(self, name: str) -> int:
        return self.regions[name].offset
