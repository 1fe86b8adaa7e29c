"""The plan by rows: every block has the whole network and a share of the rows; gradients are summed over the blocks.

For networks whose weights fit into one block twice over, with batches too large to hand every row to everyone. Nothing is
exchanged on the way through the layers; after it, each block sends its partial gradients to the tiles' owners, and these send
the new weights back.
"""

from __future__ import annotations

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.settings import (
    REGISTERS,
    RIGHT_BYTES,
    SCORE_BYTES,
    STEP,
    THREADS,
    TILE_BYTES,
    WARPS,
    Settings,
    planes_of,
)
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.optimizers import OPTIMIZERS

PARTS, COPIES = 0, 1  # the exchanges; the decision is the third
WIDEST = 128  # units of a layer: a warp holds a row tile's values of one layer in registers
MOST_TILES = 30  # of masters and gradients in a thread's registers: ptxas spills from 32 on, kilobytes at 100


class RowsPlan(Plan):
    shares_fetch = False  # every block has rows of its own

    def __init__(self, settings: Settings, chip: Chip, blocks: int, rows: int) -> None:
        """`rows`: of a block in a pass."""
        self.settings, self.chip, self.working = settings, chip, 0
        self.blocks, self.cluster, self.rows = blocks, blocks > 1, rows
        self.planes = planes_of(settings)
        self.states = len(OPTIMIZERS[settings.optimizer].state_names(settings.momentum))
        self.row_tiles = rows // 16
        self.micro_batches = -(-settings.batch // (rows * blocks))
        self.input_planes = 1 if settings.bytes_input else self.planes
        self.input_bytes = 1 if settings.bytes_input else 2
        self.layers = tuple(self._whole_layers())
        self.group = 1
        own = self.own_slots
        self.states_shared = self.states > 0 and (own * (1 + self.states) + self.slots) * 4 > REGISTERS - 150
        self.numbers_at_once = 1024
        for self.input_buffers in (2, 1):
            self._lay_out()
            if self.shared.size <= chip.shared_bytes:
                break

    def _whole_layers(self) -> list[Layer]:
        layers: list[Layer] = []
        for index, stage in enumerate(self.settings.stages):
            steps, tiles = -(-stage.linear.inputs // STEP), -(-stage.linear.outputs // STEP) * 2
            last = index == len(self.settings.stages) - 1
            layers.append(Layer(index, stage, index == 0, last, steps, tiles, 1, steps * 2))
        return layers

    @property
    def team(self) -> int:
        """Warps that take a row tile through the network together."""
        return max(team for team in (1, 2, 4, 8) if team == 1 or team * self.row_tiles <= WARPS)

    def tiles_each(self, layer: Layer) -> int:
        """Tiles of units of a layer that a warp has."""
        return -(-layer.tiles // self.team)

    def slopes_shared(self, layer: Layer) -> bool:
        """A few slopes wait for the way back in registers."""
        return self.tiles_each(layer) > 2

    def tiles_at_once(self, layer: Layer) -> int:
        """Of those, the ones whose sums it holds at once: an equal part, or all."""
        each = self.tiles_each(layer)
        return max(some for some in range(1, 1 + 8 // min(self.planes, 2)) if each % some == 0)

    @property
    def late_update(self) -> bool:
        return False

    def layer_slots(self, layer: Layer) -> int:
        """Gradient tiles of a layer a warp computes."""
        return -(-layer.steps * layer.tiles // WARPS)

    def first_slot(self, layer: Layer) -> int:
        return sum(self.layer_slots(before) for before in self.layers[: layer.index])

    @property
    def own_slots(self) -> int:
        """Of the weights a block has the masters of."""
        return -(-self.slots // self.blocks)

    @property
    def slots(self) -> int:
        return sum(self.layer_slots(layer) for layer in self.layers)

    def unit_at(self, layer: Layer) -> int:
        return sum(before.units for before in self.layers[: layer.index])

    @property
    def all_units(self) -> int:
        return sum(layer.units for layer in self.layers)

    def received_parts(self, rank: str) -> str:
        """Bytes of partial sums that block `rank` receives, as an expression."""
        tiles = f"({self.slots} - {rank} + {self.blocks - 1}) / {self.blocks} * {WARPS * self.blocks * TILE_BYTES}"
        biases = self.blocks * self.all_units * 4 * self.has_biases
        return f"{tiles} + {biases} + ({rank} == 0) * {self.blocks * self.row_tiles * SCORE_BYTES}"

    @property
    def has_biases(self) -> bool:
        return any(layer.stage.linear.bias for layer in self.layers)

    @property
    def copies_total(self) -> int:
        return sum(self.planes * layer.steps * 2 * layer.tiles * 128 for layer in self.layers)

    def _lay_out(self) -> None:
        shared, own = Memory(), self.own_slots
        shared.add("inputs", self.input_buffer_bytes * self.input_buffers)
        shared.add("targets", 4 * self.rows * self.target_words * self.input_buffers)
        for layer in self.layers:
            name, values = f"layer {layer.index}: ", self.planes * self.row_tiles * layer.tiles * RIGHT_BYTES
            shared.add(name + "weights", self.planes * layer.steps * 2 * layer.tiles * 128)
            shared.add(name + "deltas", values)
            if not layer.last:
                shared.add(name + "values", values)
                if self.slopes_shared(layer):
                    shared.add(name + "slopes", self.tiles_each(layer) * WARPS * TILE_BYTES)
        shared.add("bias", 4 * self.all_units * (1 + self.states))
        shared.add("bias sums", 4 * self.all_units * self.row_tiles)
        shared.add("bias totals", 4 * self.all_units)
        shared.add("parts", own * WARPS * self.blocks * TILE_BYTES if self.blocks > 1 else 16)
        # In turn: copies may be ahead of their reading.
        shared.add("bias parts", 2 * self.blocks * self.all_units * 4)
        shared.add("scores", 2 * self.blocks * self.row_tiles * SCORE_BYTES)
        shared.add("states", own * THREADS * 16 * self.states if self.states_shared else 16)
        self._add_bookkeeping(shared)
        self.shared, self.exchange = shared, Memory()

    @property
    def decision(self) -> int:
        return 2

    def exchange_names(self) -> dict[int, str]:
        return {PARTS: "partial gradients", COPIES: "new weights", self.decision: "the decision to go on"}

    @property
    def refusal(self) -> str:
        widest = max(layer.units for layer in self.layers)
        if widest > WIDEST:
            return f"a layer of {widest} units is too wide to divide rows, {WIDEST} are the most"
        if self.planes * max(layer.tiles for layer in self.layers) > 24:
            return f"{self.settings.precision} values of a layer of {widest} units do not fit in registers"
        if (tiles := self.own_slots + self.slots) > MOST_TILES:
            return f"{tiles} tiles of weights and gradients do not fit in a thread's registers, {MOST_TILES} do"
        return super().refusal
