"""The layout of a plan by units: every block owns units of each layer, and the blocks exchange values and deltas.

A block owns `n_tiles` consecutive tiles of eight units of every hidden layer. The last layer is small: every block computes it
whole, or the blocks sum it up. The weights of k tile k of a layer belong to warp k modulo WARPS, as one accumulator tile for
each of the block's n tiles.

The exchanges are numbered: the values of each hidden layer, then the deltas of each but the first, then the weights of each but
the first, then what the last layer needs, then the decision to go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.settings import (
    K_TILE,
    LEFT_BYTES,
    MAX_SUMS,
    N_TILE,
    REGISTERS,
    RESERVED_REGISTERS,
    RIGHT_BYTES,
    SCORE_BYTES,
    TILE_BYTES,
    WARPS,
    Settings,
)
from onelaunch.integers import ceil_div

CROWDED_TILES = 16  # of weights in a thread's registers: with more, ptxas spills where a run validates
# Buffers of rows, buffers of partial sums, row numbers computed at once: the first that fits is taken. Without a buffer of
# partial sums, a warp stores its sums over staged values that it has multiplied already; the next are staged later.
BUFFERS = ((2, 2, 1024), (2, 1, 1024), (1, 2, 1024), (1, 2, 256), (1, 1, 1024), (1, 1, 256), (1, 0, 1024), (1, 0, 256))


class UnitsLayout(Plan):
    """Which block owns what, all sizes and addresses. `UnitsPlan` adds the source and the description."""

    def __init__(
        self, settings: Settings, chip: Chip, blocks: int, cluster: bool, rows: int, *,
        reserved_registers: int = RESERVED_REGISTERS,
    ) -> None:  # fmt: skip
        """`reserved_registers`: those that weights leave free; more of them after the compiler had to spill."""
        super().__init__(settings, chip, blocks, cluster and blocks > 1, rows)
        self.reserved_registers = reserved_registers
        layers = list(self._cut_layers())
        crowded = reserved_registers > RESERVED_REGISTERS or (
            settings.validates and sum(layer.weight_tiles for layer in layers) > CROWDED_TILES
        )
        if crowded and self._lay_out(self._place_weights(layers, crowded=True)):
            return
        if self._lay_out(self._place_weights(layers, crowded=False)) or not settings.members:
            return
        # Members are placed on fewer blocks than a single run, for which more of the state may leave the chip.
        for streamed in range(self.states * max(layer.weight_tiles for layer in layers) + 1):
            if self._lay_out(self._place_weights(layers, crowded=False, streamed=streamed)):
                return

    def _cut_layers(self) -> Iterator[Layer]:
        stages, n_tiles = self.settings.stages, 0
        for index, stage in enumerate(stages):
            first, last = index == 0, index == len(stages) - 1
            k_tiles = ceil_div(stage.linear.inputs, K_TILE) if first else ceil_div(n_tiles * self.blocks, 2)
            input_tiles, outputs = n_tiles, stage.linear.outputs
            n_tiles = ceil_div(outputs, K_TILE) * 2 if last else ceil_div(outputs, N_TILE * self.blocks)
            yield Layer(index, stage, first, last, k_tiles, n_tiles, self.blocks, input_tiles)

    def _place_weights(self, layers: list[Layer], *, crowded: bool, streamed: int | None = None) -> list[Layer]:
        """Masters in registers as far as there is room, the smallest layer first, with their optimizer state if it fits too.

        `crowded`: the compiler runs out of registers. In a grid the last layer has tiles for a few warps only, but all warps
        reserve registers for them, so it moves to shared memory first. `streamed`: the largest layer comes first, and so many
        tiles of its optimizer state are in device memory.
        """
        room = max(0, REGISTERS - self.reserved_registers - 24 * (self.planes - 1)) // 4
        largest = max(layers, key=lambda layer: layer.weight_tiles)
        placed: dict[int, Any] = {}
        for layer in sorted(layers, key=lambda layer: layer.weight_tiles, reverse=streamed is not None):
            moves = crowded and layer.owned_by_input and not self.cluster
            fits = layer.weight_tiles <= room and not moves
            room -= layer.weight_tiles if fits else 0
            kept = min(self.states, room // layer.weight_tiles) if fits else 0
            if streamed is None and kept < self.states:
                kept = 0
            room -= layer.weight_tiles * kept
            away = min(streamed or 0, layer.weight_tiles * (self.states - kept)) if layer is largest else 0
            placed[layer.index] = {"masters_shared": not fits, "register_states": kept, "streamed_tiles": away}
        return [dataclasses.replace(layer, **placed[layer.index]) for layer in layers]

    def _lay_out(self, layers: list[Layer]) -> bool:
        """Assign all memory, with the most buffers that fit; whether everything fits."""
        self.layers = tuple(layers)
        self.row_tiles_at_once = self._row_tiles_at_once()
        for input_buffers, partial_buffers, row_numbers in BUFFERS:
            if partial_buffers == 0 and not self._staging_holds_sums():
                continue
            self.input_buffers, self.partial_buffers = input_buffers, partial_buffers
            self.row_numbers_at_once = row_numbers
            self._add_regions()
            if self.fits:
                return True
        return False

    def _row_tiles_at_once(self) -> int:
        """Row tiles multiplied at once: as many as the registers for their sums allow."""
        widest = max(layer.n_tiles for layer in self.layers)
        count = 1
        while self.row_tiles % (count * 2) == 0 and count * 2 * widest <= MAX_SUMS:
            count *= 2
        return count

    # Exchanges.

    @property
    def hidden(self) -> int:
        return len(self.layers) - 1

    def values_exchange(self, layer: Layer) -> int:
        return layer.index

    def deltas_exchange(self, layer: Layer) -> int:
        return self.hidden + layer.index - 1

    def back_exchange(self, layer: Layer) -> int:
        return 2 * self.hidden - 1 + layer.index - 1

    @property
    def last_exchange(self) -> int:
        return max(0, 3 * self.hidden - 2)

    @property
    def decision(self) -> int:
        return self.last_exchange + (self.hidden > 0)

    def exchange_names(self) -> dict[int, str]:
        names = {self.last_exchange: "the weights of the last layer", self.decision: "the decision to go on"}
        if self.sums_outputs:
            names[self.last_exchange] = "the gradient of the outputs"
        for layer in self.layers[: self.hidden]:
            values = f"the values of layer {layer.index}" if self.publishes(layer) else "the partial outputs"
            names[self.values_exchange(layer)] = values
            if not layer.first:
                names[self.deltas_exchange(layer)] = f"the deltas of layer {layer.index}"
                names[self.back_exchange(layer)] = f"the weights of layer {layer.index}"
        return names

    def received_bytes(self, rank: int) -> dict[int, int]:
        """Bytes that block `rank` receives in each exchange but the decision, by the number of the exchange."""
        found = {}
        for layer in self.layers[: self.hidden]:
            found[self.values_exchange(layer)] = self.layer_bytes(layer)
            if not layer.first:
                found[self.deltas_exchange(layer)] = self.layer_bytes(layer)
                found[self.back_exchange(layer)] = self.planes * layer.input_tiles * self.blocks * layer.n_tiles * 128
        last = self.layers[-1]
        if self.sums_outputs:
            rows = min(self.rows_per_block, max(0, self.rows - rank * self.rows_per_block))
            found[self.values_exchange(self.layers[-2])] = self.blocks * rows * last.units * 4
            scores = self.blocks * self.score_warps * SCORE_BYTES if rank == 0 else 0
            found[self.last_exchange] = self.planes * self.rows * last.n_tiles * 16 + scores
        elif self.hidden:
            found[self.last_exchange] = self.planes * last.n_tiles * self.blocks * last.input_tiles * 128
        return found

    def exchanged_bytes(self) -> dict[int, int]:
        return {**self.received_bytes(0), self.decision: 4}

    def layer_bytes(self, layer: Layer) -> int:
        """Bytes that a block receives when all blocks publish their units of `layer`."""
        return self.planes * self.row_tiles * self.blocks * layer.n_tiles * RIGHT_BYTES

    # Choices.

    @property
    def sums_outputs(self) -> bool:
        """Whether the outputs are summed over the blocks: in a cluster, where one more exchange costs less than all values.

        Each block multiplies its own units by its own weights of the last layer. The partial outputs of a row go to the row's
        owner, which adds them up, computes the loss and sends its gradient to all blocks.
        """
        return self.cluster and self.hidden > 0

    @property
    def outputs_at_once(self) -> bool:
        """Whether partial outputs are sent from registers, as soon as the values are finished: with one n tile per block."""
        return self.sums_outputs and self.layers[-2].n_tiles == 1

    def publishes(self, layer: Layer) -> bool:
        """Whether all blocks receive the values of a hidden layer."""
        return not (self.sums_outputs and layer.index == self.hidden - 1)

    def keeps_values(self, layer: Layer) -> bool:
        """Whether a block keeps its own values: the last layer needs those of the last hidden layer close at hand."""
        return self.blocks > 1 and layer.index == self.hidden - 1

    @property
    def late_update(self) -> bool:
        """Whether the second layer is updated in the next pass, while that pass waits for the first layer's values."""
        return self.cluster and self.micro_batches == 1 and self.hidden > 1

    @property
    def multicasts_rows(self) -> bool:
        """See `Plan`. A block may overwrite a buffer only when no block reads it any more. Once it has the first layer's values
        of this pass, all blocks have left the pass before; so it fetches after that wait."""
        return self.cluster and self.input_buffers == 2 and self.hidden > 1

    @property
    def row_blocks_per_warp(self) -> int:
        """Blocks of eight rows that a warp finishes at once: two in a grid, where a lane then writes eight bytes."""
        return 1 if self.blocks == 1 or self.cluster else 2

    @property
    def rows_per_block(self) -> int:
        """Rows of a pass whose outputs a block adds up."""
        return ceil_div(self.rows, self.blocks)

    @property
    def score_warps(self) -> int:
        """Warps that compute the loss of a block's rows, one row at a time."""
        return min(WARPS, self.rows_per_block)

    @property
    def predicted_microseconds(self) -> float:
        exchange, kilobyte = (0.0, 0.0) if self.blocks == 1 else (0.2, 0.02) if self.cluster else (1.0, 0.012)
        groups, time = self.row_tiles // self.row_tiles_at_once, 0.8
        for layer in self.layers:
            phases = 2 if layer.first else 3
            pairs = self.planes * (self.planes + 1) / 2
            products = self.row_tiles * layer.n_tiles * layer.k_tiles_per_warp * pairs
            time += phases * (0.25 * groups + (0.0 if layer.last else 0.008 * products))
            if not layer.last:
                time += (1 if layer.first else 2) * (exchange + kilobyte * self.layer_bytes(layer) / 1024)
        time *= 1.2
        if self.input_buffers == 1:  # the pass waits for its rows
            time += 0.012 * self.input_buffer_bytes / 1024
        return time * self.micro_batches

    # Memory.

    def out_bytes(self, layer: Layer) -> int:
        return self.planes * self.row_tiles * layer.next_k_tiles * LEFT_BYTES

    def out_buffers(self, layer: Layer) -> int:
        """Two where a block may publish the next pass while another still reads this one. No block is further ahead."""
        return 2 if self.blocks > 1 and (layer.first or not self.cluster) else 1

    def back_bytes(self, layer: Layer) -> int:
        return self.planes * layer.input_tiles * layer.next_k_tiles * RIGHT_BYTES

    def copies_bytes(self) -> int:
        """16-bit copies of the last layer's weights, as all blocks have them."""
        return self.planes * self.layers[-1].n_tiles * self.layers[-1].k_tiles * RIGHT_BYTES

    @property
    def partials_bytes(self) -> int:
        summed = self.layers[: self.hidden] if self.sums_outputs else self.layers
        tiles = max(layer.split_k * layer.n_tiles for layer in summed)
        for before, layer in zip(self.layers, self.layers[1:-1], strict=False):
            tiles = max(tiles, min(WARPS, layer.next_k_tiles) * before.n_tiles)
        return tiles * self.row_tiles_at_once * TILE_BYTES

    @property
    def _staged_k_tiles(self) -> int:
        """k tiles of all blocks' values or deltas that a block of a grid copies into its shared memory."""
        return max((layer.next_k_tiles for layer in self.layers[:-1]), default=0)

    def _staging_holds_sums(self) -> bool:
        """Whether every warp of a grid has staged as many k tiles as a layer has n tiles, of all rows multiplied at once."""
        enough = max(layer.n_tiles for layer in self.layers) * WARPS <= self._staged_k_tiles
        return self.blocks > 1 and not self.cluster and self.row_tiles_at_once == self.row_tiles and enough

    def _add_regions(self) -> None:
        shared, exchange = self._add_inputs(), Memory()
        slots = shared if self.blocks == 1 or self.cluster else exchange
        if self.partial_buffers:
            shared.add("partial sums", self.partial_buffers * self.partials_bytes)
        if slots is exchange:
            shared.add("staging", self.planes * self.row_tiles * self._staged_k_tiles * LEFT_BYTES)
        for layer in self.layers:
            name = f"layer {layer.index}: "
            tiles = TILE_BYTES * WARPS * layer.weight_tiles
            if layer.masters_shared:
                shared.add(name + "masters", tiles)
            for state in range(layer.register_states, self.states):
                away = layer.streamed_of(state, self.states)
                shared.add(f"{name}state {state}", TILE_BYTES * WARPS * (layer.weight_tiles - away))
                if away:
                    exchange.add(f"{name}state {state}", TILE_BYTES * WARPS * away)
            if self.micro_batches > 1:
                shared.add(name + "gradients", tiles)
            shared.add(name + "bias", 4 * layer.units * (1 + self.states))
            shared.add(name + "bias sums", 4 * layer.units * (2 * self.row_tiles + (self.micro_batches > 1)))
            shared.add(name + "deltas", self.planes * self.row_tiles * layer.n_tiles * RIGHT_BYTES)
            if layer.last:
                self._add_last_layer(shared, slots, layer)
                continue
            if self.keeps_values(layer):
                shared.add(name + "own values", self.planes * self.row_tiles * (layer.n_tiles + 1) * RIGHT_BYTES)
            shared.add(name + "slopes", self.row_tiles * layer.n_tiles * TILE_BYTES)
            if self.publishes(layer):
                slots.add(name + "values of all", self.out_buffers(layer) * self.out_bytes(layer))
            if not layer.first:
                slots.add(name + "deltas of all", self.out_bytes(layer))
                per_block = 2 * self.back_bytes(layer)
                slots.add(name + "weights back", per_block * (1 if slots is shared else self.blocks))
        self._add_bookkeeping(shared, SCORE_BYTES * self.blocks * self.score_warps)
        self.shared, self.exchange = shared, exchange

    def _add_last_layer(self, shared: Memory, slots: Memory, layer: Layer) -> None:
        name = f"layer {layer.index}: "
        if layer.owned_by_input:
            shared.add(name + "weights back", self.planes * layer.input_tiles * layer.n_tiles * RIGHT_BYTES // 2)
        if self.sums_outputs:
            shared.add(name + "partial outputs", 4 * self.blocks * self.rows_per_block * layer.units)
        elif layer.owned_by_input:
            slots.add(name + "weights of all", 2 * self.copies_bytes())

    def refusal_in_a_cluster(self) -> str:
        """Why the largest cluster cannot run this plan; empty when it can."""
        largest = self.chip.largest_cluster
        reserved = self.reserved_registers
        return type(self)(self.settings, self.chip, largest, True, self.rows, reserved_registers=reserved).refusal
