"""The layout of a plan by rows: every block has the whole network and a part of the rows; gradients are summed.

It suits networks whose weights fit into one block twice, with batches too large to send every row to every block. Nothing is
exchanged between layers. After the backward pass, each block sends its partial gradients to the owners of the tiles, and the
owners send the new weights back.
"""

from __future__ import annotations

from itertools import product

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.settings import (
    K_TILE,
    RIGHT_BYTES,
    SCORE_BYTES,
    TILE_BYTES,
    WARPS,
    Settings,
)
from onelaunch.integers import ceil_div
from onelaunch.run.network import Activation, Dropout

PARTS, COPIES = 0, 1  # the numbers of the exchanges; the decision is the third
MAX_WIDTH = 128  # units of a layer: a warp holds a row tile's values of one layer in registers
MAX_REGISTER_TILES = 30  # of masters and gradients per thread: ptxas spills from 32 on, kilobytes at 100
# Registers per thread beside the masters, where a tile is updated at once: with few tiles of weights, and with more. ptxas then
# spills where weights are loaded and saved, but hardly in a step.
FEW_TILES, WORKING_REGISTERS, MORE_WORKING_REGISTERS = 8, 40, 76
BUFFERS = ((2, 1024), (2, 256), (1, 1024), (1, 256))  # of rows, and row numbers computed at once: the first that fits
CLOCKS_PER_MICROSECOND = 1755


class RowsLayout(Plan):
    """Which block owns what, all sizes and addresses. `RowsPlan` adds the source and the description."""

    decision = 2  # after PARTS and COPIES
    multicasts_rows = False  # every block has rows of its own

    def __init__(self, settings: Settings, chip: Chip, blocks: int, rows: int, warps: int = WARPS) -> None:
        """`rows`: of one block in one pass; `warps`: of a block."""
        super().__init__(settings, chip, blocks, blocks > 1, rows, row_partitions=blocks, warps=warps)
        self.layers = self._whole_layers()
        self._place_states()

    def _place_states(self) -> None:
        """Put each optimizer state where there is room, registers first, and lay out the memory with the most buffers."""
        registers = 4 * (self.own_slots * (1 + self.states) + (0 if self.updates_at_once else self.slots))
        roomy = registers <= self.registers_per_thread - 150
        places = [("registers",) * 2] if roomy else []
        places += [("shared memory",) * 2]
        places += [("shared memory", "device memory"), ("device memory",) * 2] if self.updates_at_once else []
        for state_places, buffers in product(places if self.states else [("registers",) * 2], BUFFERS):
            self.state_places = state_places
            self.input_buffers, self.row_numbers_at_once = buffers
            self._add_regions()
            if self.fits:
                return

    def _whole_layers(self) -> tuple[Layer, ...]:
        layers, stages = [], self.settings.stages
        for index, stage in enumerate(stages):
            k_tiles, n_tiles = ceil_div(stage.linear.inputs, K_TILE), ceil_div(stage.linear.outputs, K_TILE) * 2
            last = index == len(stages) - 1
            layers.append(Layer(index, stage, index == 0, last, k_tiles, n_tiles, 1, k_tiles * 2))
        return tuple(layers)

    @property
    def team(self) -> int:
        """Warps that take a row tile through the network together."""
        return max(team for team in (1, 2, 4, 8, 16) if team == 1 or team * self.row_tiles <= self.warps)

    def n_tiles_per_warp(self, layer: Layer) -> int:
        """n tiles of a layer that one warp of a team computes."""
        return ceil_div(layer.n_tiles, self.team)

    def n_tiles_at_once(self, layer: Layer) -> int:
        """Of these, the ones whose sums the warp holds at once: an equal part, or all."""
        each = self.n_tiles_per_warp(layer)
        most = 4 if self.free_registers < 160 else 8 // min(self.planes, 2)
        return max(some for some in range(1, 1 + most) if each % some == 0)

    def slopes_shared(self, layer: Layer) -> bool:
        """Whether slopes wait for the backward pass in shared memory; a few stay in registers."""
        return self.n_tiles_per_warp(layer) > 2

    def slopes_of_values(self, layer: Layer) -> bool:
        """Whether the slopes follow from the stored values: those of ReLU, alone or before a dropout."""
        chain = layer.stage.chain
        relu = bool(chain) and isinstance(chain[0], Activation) and chain[0].name == "relu"
        return relu and (len(chain) == 1 or (len(chain) == 2 and isinstance(chain[1], Dropout)))

    @property
    def updates_at_once(self) -> bool:
        """Whether a tile is updated as soon as its gradient is computed: nothing is added to it by others or later."""
        return self.blocks == 1 and self.micro_batches == 1

    @property
    def tiles_at_once(self) -> int:
        """Tiles of weights that a warp updates together."""
        return 4 if self.planes == 1 and self.free_registers >= 160 else 2

    @property
    def free_registers(self) -> int:
        """Registers of a thread beside the masters."""
        return self.registers_per_thread - 4 * self.own_slots

    # Slots: a warp computes the gradient of one tile of weights per slot. Slot s belongs to block s % blocks.

    def layer_slots(self, layer: Layer) -> int:
        return ceil_div(layer.k_tiles * layer.n_tiles, self.warps)

    def first_slot(self, layer: Layer) -> int:
        return sum(self.layer_slots(before) for before in self.layers[: layer.index])

    @property
    def slots(self) -> int:
        return sum(self.layer_slots(layer) for layer in self.layers)

    @property
    def own_slots(self) -> int:
        """Slots of which a block has the masters, at most."""
        return ceil_div(self.slots, self.blocks)

    # Biases: those of all layers, one after another.

    def unit_at(self, layer: Layer) -> int:
        return sum(before.units for before in self.layers[: layer.index])

    @property
    def all_units(self) -> int:
        return sum(layer.units for layer in self.layers)

    @property
    def has_biases(self) -> bool:
        return any(layer.stage.linear.bias for layer in self.layers)

    # Exchanges.

    def exchange_names(self) -> dict[int, str]:
        return {PARTS: "partial gradients", COPIES: "new weights", self.decision: "the decision to go on"}

    def exchanged_bytes(self) -> dict[int, int]:
        tiles = self.own_slots * self.warps * self.blocks * TILE_BYTES
        parts = tiles + self.blocks * (self.all_units * 4 * self.has_biases + self.row_tiles * SCORE_BYTES)
        return {PARTS: parts, COPIES: self.copies_bytes, self.decision: 4}

    def copy_bytes(self, layer: Layer) -> int:
        """16-bit copies of a layer's weights."""
        return self.planes * layer.k_tiles * layer.n_tiles * RIGHT_BYTES

    @property
    def copies_bytes(self) -> int:
        return sum(self.copy_bytes(layer) for layer in self.layers)

    # Memory.

    def _add_regions(self) -> None:
        shared = self._add_inputs()
        for layer in self.layers:
            name, values = f"layer {layer.index}: ", self.planes * self.row_tiles * layer.n_tiles * RIGHT_BYTES
            shared.add(name + "weights", self.copy_bytes(layer))
            shared.add(name + "deltas", values)
            if not layer.last:
                shared.add(name + "values", values)
                if self.slopes_shared(layer) and not self.slopes_of_values(layer):
                    shared.add(name + "slopes", self.n_tiles_per_warp(layer) * self.warps * TILE_BYTES)
        shared.add("bias", 4 * self.all_units * (1 + self.states))
        shared.add("bias sums", 4 * self.all_units * self.row_tiles)
        shared.add("bias totals", 4 * self.all_units)
        if self.blocks > 1:
            shared.add("parts", self.own_slots * self.warps * self.blocks * TILE_BYTES)
            # Two each, used in turn: a block that has all new copies may send its next parts while another still reads.
            shared.add("bias parts", 2 * self.blocks * self.all_units * 4)
        shared.add("scores", 2 * self.blocks * self.row_tiles * SCORE_BYTES)
        self.shared, self.exchange = shared, Memory()
        for number in range(self.states):
            memory = {"shared memory": shared, "device memory": self.exchange}.get(self.state_places[number])
            if memory is not None:
                memory.add(f"state {number}", self.own_slots * self.threads * 16)
        self._add_bookkeeping(shared)

    @property
    def refusal(self) -> str:
        widest = max(layer.units for layer in self.layers)
        if widest > MAX_WIDTH:
            return f"a layer of {widest} units is too wide to divide rows, {MAX_WIDTH} are the most"
        if self.planes * max(layer.n_tiles for layer in self.layers) > 24:
            return f"{self.settings.precision} values of a layer of {widest} units do not fit in registers"
        tiles, most = self.own_slots + self.slots, MAX_REGISTER_TILES
        if self.updates_at_once:
            working = WORKING_REGISTERS if self.own_slots <= FEW_TILES else MORE_WORKING_REGISTERS
            tiles, most = self.own_slots, (self.registers_per_thread - working) // 4
        if tiles > most:
            return f"{tiles} tiles of weights and gradients do not fit in a thread's registers, {most} do"
        return super().refusal

    @property
    def predicted_microseconds(self) -> float:
        pairs = self.planes * (self.planes + 1) / 2
        clocks = 500.0 + self.slots * self.row_tiles * pairs * 30  # the loss; the gradient of the weights
        for layer in self.layers:
            n_tiles = layer.n_tiles if layer.last else self.n_tiles_per_warp(layer)
            clocks += (1 if layer.first else 2) * (250 + 20 * layer.k_tiles * n_tiles * pairs)
        clocks *= self.micro_batches
        if self.blocks > 1:
            sent = self.slots * self.warps * TILE_BYTES + self.copies_bytes
            clocks += 1000 + 100 * self.blocks + sent / 40  # bytes per clock
        clocks += 150 * self.own_slots  # the update
        return (clocks + 3300) / CLOCKS_PER_MICROSECOND
