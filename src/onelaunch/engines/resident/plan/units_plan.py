"""The plan of a resident run: which block owns which units, what lies where, which phase reads and writes what.

Pure arithmetic: no device is asked. `source.py` writes the plan down as CUDA constants, the tests execute it in NumPy.

Units are owned in tiles of eight, inputs are multiplied in steps of sixteen; both follow from the tensor core's shape. A block
owns `tiles` consecutive tiles of every hidden layer; the last layer is small and every block computes it whole. The weights of
step k of a layer belong to warp k modulo WARPS, as one accumulator tile for each of the block's tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.exchanges import Exchanges
from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.settings import (
    INTERVAL,
    LEFT_BYTES,
    MOST_SUMS,
    REGISTERS,
    RIGHT_BYTES,
    ROW_TILE,
    SCORE_BYTES,
    STEP,
    TILE,
    TILE_BYTES,
    WARPS,
    WORKING_REGISTERS,
    Settings,
    planes_of,
)
from onelaunch.optimizers import OPTIMIZERS

# Buffers of rows, buffers of partial sums, row numbers found at once: the most there is room for. At last no buffer of partial
# sums: a warp's lie where it has staged values that it has multiplied by then, and the next are staged later.
CROWDED_TILES = 16  # of weights in a thread's registers: with more, ptxas spills where a run validates
ROOM = ((2, 2, 1024), (2, 1, 1024), (1, 2, 1024), (1, 1, 1024), (1, 1, 256), (1, 0, 1024), (1, 0, 256))


class Plan(Exchanges):
    def __init__(
        self, settings: Settings, chip: Chip, blocks: int, cluster: bool, rows: int, *, working: int = WORKING_REGISTERS
    ) -> None:
        """`working`: registers that the weights leave free; more of them when the compiler had to spill."""
        self.settings, self.chip, self.working = settings, chip, working
        self.blocks, self.cluster = blocks, cluster and blocks > 1
        self.planes = planes_of(settings)
        self.states = len(OPTIMIZERS[settings.optimizer].state_names(settings.momentum))
        self.rows = rows
        self.row_tiles = rows // ROW_TILE
        self.micro_batches = -(-settings.batch // rows)
        self.input_planes = 1 if settings.bytes_input else self.planes
        self.input_bytes = 1 if settings.bytes_input else 2
        layers = list(self._layers())
        crowded = working > WORKING_REGISTERS or (
            settings.validates and sum(layer.weight_tiles for layer in layers) > CROWDED_TILES
        )
        if not (crowded and self._place(self._place_weights(layers, crowded=True))):
            self._place(self._place_weights(layers, crowded=False))

    def _place(self, layers: list[Layer]) -> bool:
        """Give everything its place; whether there is room."""
        self.layers = tuple(layers)
        self.group = self._group()
        rooms = [room for room in ROOM if room[1] or self._staging_takes_sums()]
        for self.input_buffers, self.partial_buffers, self.numbers_at_once in rooms:
            self._lay_out()
            if self.shared.size <= self.chip.shared_bytes:
                return True
        return False

    def _layers(self) -> Iterator[Layer]:
        stages, tiles = self.settings.stages, 0
        for index, stage in enumerate(stages):
            first, last = index == 0, index == len(stages) - 1
            steps = -(-stage.linear.inputs // STEP) if first else -(-tiles * self.blocks // 2)
            own = -(-stage.linear.outputs // STEP) * 2 if last else -(-stage.linear.outputs // (TILE * self.blocks))
            yield Layer(index, stage, first, last, steps, own, self.blocks, tiles)
            tiles = own

    def _place_weights(self, layers: list[Layer], *, crowded: bool) -> list[Layer]:
        """Masters in registers as far as they go, the smallest first; optimizer state with them where there is room.

        `crowded`: the compiler runs out of registers. A grid's last layer has tiles for a few of its warps, but all give
        registers for them: it is the first to go.
        """
        room = max(0, REGISTERS - self.working - 24 * (self.planes - 1)) // 4
        placed = {}
        for layer in sorted(layers, key=lambda layer: layer.weight_tiles):
            goes = crowded and layer.owned_by_input and not self.cluster
            fits = layer.weight_tiles <= room and not goes
            room -= layer.weight_tiles if fits else 0
            with_states = fits and self.states > 0 and layer.weight_tiles * self.states <= room
            room -= layer.weight_tiles * self.states if with_states else 0
            placed[layer.index] = (not fits, not with_states)
        return [
            dataclasses.replace(layer, masters_shared=placed[layer.index][0], states_shared=placed[layer.index][1])
            for layer in layers
        ]

    def _group(self) -> int:
        """Row tiles multiplied at once."""
        widest = max(layer.tiles for layer in self.layers)
        group = 1
        while group * 2 <= self.row_tiles and self.row_tiles % (group * 2) == 0:
            if group * 2 * widest > MOST_SUMS:
                break
            group *= 2
        return group

    # Sizes.

    def out_bytes(self, layer: Layer) -> int:
        return self.planes * self.row_tiles * layer.output_steps * LEFT_BYTES

    def out_buffers(self, layer: Layer) -> int:
        """A block that hands out layer 0 of the next pass may be ahead of one still in this pass; nobody is ahead further."""
        return 2 if self.blocks > 1 and (layer.first or not self.cluster) else 1

    def back_bytes(self, layer: Layer) -> int:
        return self.planes * layer.input_tiles * layer.output_steps * RIGHT_BYTES

    def copies_bytes(self) -> int:
        """Half-precision copies of the last layer's weights, as everyone has them."""
        return self.planes * self.layers[-1].tiles * self.layers[-1].steps * RIGHT_BYTES

    @property
    def sums_outputs(self) -> bool:
        """Whether the outputs are summed over the blocks: in a cluster, where one more exchange costs less than all values.

        Each block multiplies its own units by its own weights of the last layer. Partial outputs of a row go to the row's
        owner, who adds them up, takes the loss and sends its gradient to all.
        """
        return self.cluster and self.hidden > 0

    @property
    def outputs_at_once(self) -> bool:
        """Whether partial outputs are sent as the values are finished, out of the registers: one tile of them a block."""
        return self.sums_outputs and self.layers[-2].tiles == 1

    def publishes(self, layer: Layer) -> bool:
        """Whether everyone gets the values of a hidden layer."""
        return not (self.sums_outputs and layer.index == self.hidden - 1)

    def keeps_values(self, layer: Layer) -> bool:
        """Where the block's own values of the last hidden layer are not among all, or far away: the last layer needs them."""
        return self.blocks > 1 and layer.index == self.hidden - 1

    @property
    def rows_each(self) -> int:
        """Rows of a pass whose outputs a block adds up."""
        return -(-self.rows // self.blocks)

    @property
    def score_warps(self) -> int:
        """Warps that take the loss of a block's rows, one at a time."""
        return min(WARPS, self.rows_each)

    def exchanged_bytes(self, layer: Layer) -> int:
        """What a block receives when everyone hands out its units of `layer`."""
        return self.planes * self.row_tiles * self.blocks * layer.tiles * RIGHT_BYTES

    @property
    def partials_bytes(self) -> int:
        summed = self.layers[: self.hidden] if self.sums_outputs else self.layers
        most = max(layer.split * layer.tiles for layer in summed)
        for before, layer in zip(self.layers, self.layers[1:-1], strict=False):
            most = max(most, min(WARPS, layer.output_steps) * before.tiles)
        return most * self.group * TILE_BYTES

    @property
    def staging_bytes(self) -> int:
        """Where a grid's warps bring their steps of everyone's values or deltas."""
        steps = max((layer.output_steps for layer in self.layers[:-1]), default=0)
        return self.planes * self.row_tiles * steps * LEFT_BYTES

    def _staging_takes_sums(self) -> bool:
        """Whether every warp has staged as many steps as a layer has tiles, of all rows multiplied at once: a grid's do."""
        most = max(layer.tiles for layer in self.layers)
        steps = self.staging_bytes // (self.planes * self.row_tiles * LEFT_BYTES)
        return self.blocks > 1 and not self.cluster and self.group == self.row_tiles and most * WARPS <= steps

    @property
    def looks(self) -> int:
        """Tables of learning rates between two looks at the host: a look costs microseconds, a step of few rows takes few."""
        return 4 if self.settings.batch <= 64 else 1

    @property
    def input_pitch(self) -> int:
        """Bytes of a row in global memory: whole steps."""
        return self.layers[0].steps * STEP * self.input_bytes

    @property
    def shared_pitch(self) -> int:
        """Bytes of a row in shared memory: an odd number of 16-byte pieces, so that eight rows meet no bank twice."""
        return self.input_pitch // 16 // 2 * 32 + 16 if self.input_pitch // 16 % 2 else self.input_pitch + 16

    @property
    def input_buffer_bytes(self) -> int:
        return self.input_planes * self.rows * self.shared_pitch

    @property
    def target_words(self) -> int:
        linear = self.settings.stages[-1].linear
        return 1 if self.settings.loss == "cross_entropy" else linear.outputs

    @property
    def late_update(self) -> bool:
        """Whether the second layer is updated in the next pass, while that waits for the first layer's values."""
        return self.cluster and self.micro_batches == 1 and self.hidden > 1

    @property
    def shares_fetch(self) -> bool:
        """Whether a block of a cluster brings its share of the next rows to all. It must know that nobody reads the buffer any
        more: all have left the pass before whose values of the first layer it has, so it fetches after that layer's wait."""
        return self.cluster and self.input_buffers == 2 and self.hidden > 1

    @property
    def table_rows(self) -> int:
        """Row numbers of a step that a block needs, with those that fill up its last pass."""
        return self.micro_batches * self.rows

    @property
    def lot(self) -> int:
        """Steps whose row numbers are found at once."""
        return max(1, min(INTERVAL, self.numbers_at_once // self.table_rows))

    @property
    def finish(self) -> int:
        """Blocks of eight rows a warp finishes at once: two in a grid, where a lane then writes eight bytes."""
        return 1 if self.blocks == 1 or self.cluster else 2

    def _lay_out(self) -> None:
        shared, exchange = Memory(), Memory()
        slots = shared if self.blocks == 1 or self.cluster else exchange
        shared.add("inputs", self.input_buffer_bytes * self.input_buffers)
        shared.add("targets", 4 * self.rows * self.target_words * self.input_buffers)
        if self.partial_buffers:
            shared.add("partial sums", self.partial_buffers * self.partials_bytes)
        if slots is exchange:
            shared.add("staging", self.staging_bytes)
        for layer in self.layers:
            name = f"layer {layer.index}: "
            tile = TILE_BYTES * WARPS * layer.weight_tiles
            if layer.masters_shared:
                shared.add(name + "masters", tile)
            if layer.states_shared and self.states:
                shared.add(name + "states", tile * self.states)
            if self.micro_batches > 1:
                shared.add(name + "gradients", tile)
            shared.add(name + "bias", 4 * layer.units * (1 + self.states))
            shared.add(name + "bias sums", 4 * layer.units * (2 * self.row_tiles + (self.micro_batches > 1)))
            shared.add(name + "deltas", self.planes * self.row_tiles * layer.tiles * RIGHT_BYTES)
            if layer.last:
                if layer.owned_by_input:
                    shared.add(name + "weights back", self.planes * layer.input_tiles * layer.tiles * RIGHT_BYTES // 2)
                if self.sums_outputs:
                    shared.add(name + "partial outputs", 4 * self.blocks * self.rows_each * layer.units)
                elif layer.owned_by_input:
                    slots.add(name + "weights of all", 2 * self.copies_bytes())
                continue
            if self.keeps_values(layer):
                shared.add(name + "own values", self.planes * self.row_tiles * (layer.tiles + 1) * RIGHT_BYTES)
            shared.add(name + "slopes", self.row_tiles * layer.tiles * TILE_BYTES)
            if self.publishes(layer):
                slots.add(name + "values of all", self.out_buffers(layer) * self.out_bytes(layer))
            if not layer.first:
                slots.add(name + "deltas of all", self.out_bytes(layer))
                per_block = 2 * self.back_bytes(layer)
                slots.add(name + "weights back", per_block * (1 if slots is shared else self.blocks))
        self._add_bookkeeping(shared)
        self.shared, self.exchange = shared, exchange

    def _add_bookkeeping(self, shared: Memory) -> None:
        """What every placement has beside its network."""
        shared.add("losses", max(4 * WARPS, SCORE_BYTES * self.blocks * self.score_warps))
        shared.add("validation loss", 8)
        shared.add("correct", 4)
        shared.add("broken", 4)  # a loss was not finite
        shared.add("decision", 8)
        shared.add("fault", 8)
        shared.add("rates", 16 * INTERVAL)
        shared.add("round keys", 32 * self.lot)
        shared.add("row numbers", 8 * self.lot * self.table_rows)
        shared.add("barriers", 16 * self.exchanges)
        shared.add("row barriers", 8 * self.input_buffers)

    @property
    def refusal(self) -> str:
        """Why this plan cannot run on its chip; empty when it can."""
        if self.shared.size > self.chip.shared_bytes:
            return (
                f"{self.blocks} blocks need {-(-self.shared.size // 1024)} KiB of shared memory each, "
                f"{self.chip.shared_bytes // 1024} are there"
            )
        if self.blocks > self.chip.multiprocessors:
            return f"{self.blocks} blocks do not fit on {self.chip.multiprocessors} multiprocessors at once"
        return ""
