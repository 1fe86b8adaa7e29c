"""A block of a plan by rows: it has the whole network and a part of the rows; the owners of the tiles sum the gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.rows_layout import COPIES, PARTS
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import K_TILE, N_TILE, SCORE_BYTES, TILE_BYTES
from tests.engines.resident.exchanges import Piece, Ready, Wires
from tests.engines.resident.fragments import BYTES, Array
from tests.engines.resident.running import Runner, Task, chain, loss_of


class RowsBlock(Runner):
    plan: RowsPlan

    def __init__(
        self, wires: Wires, task: Task, phases: Sequence[str], forward_phases: Sequence[str], rank: int
    ) -> None:
        super().__init__(wires, task, phases, forward_phases, rank)
        self.partitions, self.partition = self.plan.blocks, rank
        shapes = [(layer.units, layer.k_tiles * K_TILE) for layer in self.plan.layers]
        self.masters = [
            np.zeros(shape) for shape in shapes
        ]  # the whole layer, of which only the block's own tiles are used
        self.states = [np.zeros(shape) for shape in shapes]
        self.biases = np.zeros(self.plan.all_units)
        self.bias_states = np.zeros(self.plan.all_units)
        self.has_bias = np.zeros(self.plan.all_units)
        self.gradients: list[Array] = []
        self.bias_sums = np.zeros(self.plan.all_units)
        for layer, weight, bias in zip(self.plan.layers, task.weights, task.biases, strict=True):
            at = self.plan.unit_at(layer)
            self.masters[layer.index][: len(weight), : weight.shape[1]] = weight
            self.biases[at : at + len(bias)] = bias
            self.has_bias[at : at + len(bias)] = layer.stage.linear.bias

    def begin(self) -> Iterator[Ready | None]:
        self.copy_own(0)
        yield from self.wait(COPIES, 0, self.plan.layers[0])

    def collect(self, layer: Layer, weight: Array, bias: Array) -> None:
        for _, tile in self.own_tiles(layer):
            where = self.tile_at(layer, tile)
            weight[where] = self.masters[layer.index][where]
        at = self.plan.unit_at(layer)
        bias[: layer.units] = self.biases[at : at + layer.units]

    # Tiles of sixteen inputs by eight units, divided among warps and, by slot, among blocks.

    def tiles(self, layer: Layer) -> Iterator[tuple[int, int, int]]:
        """(slot, warp, tile) of a layer, padding included."""
        slots = self.plan.layer_slots(layer)
        for warp, slot in product(range(self.plan.warps), range(slots)):
            yield self.plan.first_slot(layer) + slot, warp, warp * slots + slot

    def own_tiles(self, layer: Layer) -> Iterator[tuple[int, int]]:
        """(slot, tile) of the tiles that this block owns, without padding."""
        for slot, _, tile in self.tiles(layer):
            if slot % self.plan.blocks == self.rank and tile < layer.k_tiles * layer.n_tiles:
                yield slot, tile

    @staticmethod
    def tile_at(layer: Layer, tile: int) -> tuple[slice, slice]:
        k_tile, n = divmod(tile, layer.n_tiles)
        return slice(n * N_TILE, (n + 1) * N_TILE), slice(k_tile * K_TILE, (k_tile + 1) * K_TILE)

    def copy_own(self, use: int) -> None:
        for layer in self.plan.layers:
            for _, tile in self.own_tiles(layer):
                self.copy_tile(layer, tile, use)

    def copy_tile(self, layer: Layer, tile: int, use: int) -> None:
        (k_tile, n), values = divmod(tile, layer.n_tiles), self.masters[layer.index][self.tile_at(layer, tile)]
        pieces: list[Piece] = []
        for plane, half in product(range(self.plan.planes), (0, 1)):
            offset = ((plane * layer.n_tiles + n) * layer.k_tiles * 2 + k_tile * 2 + half) * BYTES
            pieces.append((offset, values[:, half * N_TILE :][:, :N_TILE] / self.plan.planes))
        self.write(range(self.plan.blocks), f"layer {layer.index}: weights", COPIES, use, pieces)

    def read_copies(self, layer: Layer) -> Array:
        found = np.zeros((layer.units, layer.k_tiles * K_TILE))
        for plane, n, tile in product(range(self.plan.planes), range(layer.n_tiles), range(layer.k_tiles * 2)):
            offset = ((plane * layer.n_tiles + n) * layer.k_tiles * 2 + tile) * BYTES
            values = self.read(f"layer {layer.index}: weights", COPIES, self.step + self.trained, offset, 0)
            found[n * N_TILE :][:N_TILE, tile * N_TILE :][:, :N_TILE] += values
        return found

    # Phases.

    def row_tiles(self, layer: Layer) -> Iterator[None]:
        """Take this block's rows through the network and back."""
        layers = self.plan.layers
        x, target = self.fetched()
        weights = [self.read_copies(layer) for layer in layers]
        values, slopes = [x], []
        for layer, weight in zip(layers, weights, strict=True):
            at = self.plan.unit_at(layer)
            z, slope = chain(layer, values[-1] @ weight.T + self.biases[at : at + layer.units])
            real = np.arange(layer.units) < layer.stage.linear.outputs
            values.append((z * real)[:, : layers[layer.index + 1].k_tiles * K_TILE if not layer.last else None])
            slopes.append(slope * real)
        loss, delta = loss_of(self.plan, values[-1], target, self.count)
        self.total += loss
        self.deltas = [delta * slopes[-1]]
        for index in range(len(layers) - 1, 0, -1):
            back = self.deltas[0] @ weights[index]
            self.deltas.insert(0, back[:, : layers[index - 1].units] * slopes[index - 1])
        self.values = values
        yield None

    def fetch_validation_rows(self, layer: Layer) -> Iterator[None]:
        """Fetch the next rows, unless the pass trains: it fetches later."""
        return self.fetch_the_next_rows(layer) if self.trained else iter(())

    def meet(self, layer: Layer) -> Iterator[None]:
        self.clock.meet()
        yield None

    def gradient(self, layer: Layer) -> Iterator[None]:
        inputs = [self.fetched()[0], *self.values[1:-1]]
        found = [delta.T @ values for delta, values in zip(self.deltas, inputs, strict=True)]
        self.gradients = found if self.first else [a + b for a, b in zip(self.gradients, found, strict=True)]
        yield None

    def sum_biases(self, layer: Layer) -> Iterator[None]:
        sums = np.concatenate([delta.sum(axis=0) for delta in self.deltas])
        self.bias_sums = sums if self.first else self.bias_sums + sums
        yield None

    def update(self, layer: Layer) -> Iterator[Ready | None]:
        if not self.last:
            return
        self.send_parts()
        yield from self.wait(PARTS, self.step, layer)
        for layer in self.plan.layers:
            for slot, tile in self.own_tiles(layer):
                where = self.tile_at(layer, tile)
                state, parts = self.states[layer.index], self.read_parts(layer, slot, tile)
                state[where] = self.task.momentum * state[where] + parts
                self.masters[layer.index][where] -= self.task.lr * state[where]
                self.copy_tile(layer, tile, self.step + 1)
            yield None
        self.step_biases()
        self.add_scores()
        yield from self.wait(COPIES, self.step + 1, layer)

    def gradient_and_update(self, layer: Layer) -> Iterator[Ready | None]:
        """One block, one pass per step. With one buffer of rows, the first layer's gradient comes in a phase of its own."""
        yield from self.sum_biases(layer)
        if "first gradient and update" not in self.phases:
            yield from self.gradient(layer)
        yield from self.update(layer)

    def first_gradient_and_update(self, layer: Layer) -> Iterator[None]:
        """The only reader of the rows, before the next ones are fetched over them. The other gradients are independent."""
        yield from self.gradient(layer)

    # Partial gradients go to their owners, sums of biases to all blocks, losses to block 0.

    def part_offset(self, slot: int, warp: int, sender: int) -> int:
        return ((slot // self.plan.blocks * self.plan.warps + warp) * self.plan.blocks + sender) * TILE_BYTES

    def bias_offset(self, sender: int, use: int) -> int:
        """There are as many buffers as fit into the region; they are used in turn."""
        each = self.plan.all_units * 4
        buffers = self.plan.shared.regions["bias parts"].bytes // (self.plan.blocks * each)
        return (use % buffers * self.plan.blocks + sender) * each

    def score_offset(self, sender: int, m: int, use: int) -> int:
        return ((use % 2 * self.plan.blocks + sender) * self.plan.row_tiles + m) * SCORE_BYTES

    def add_scores(self) -> None:
        """Block 0 adds up the losses of all blocks."""
        if self.rank == 0 and self.plan.blocks > 1:
            entries = product(range(self.plan.blocks), range(self.plan.row_tiles))
            offsets = [self.score_offset(sender, m, self.step) for sender, m in entries]
            self.total = sum(float(self.read("scores", PARTS, self.step, offset, 0)[0]) for offset in offsets)

    def send_parts(self) -> None:
        if self.plan.blocks == 1:
            return
        for layer in self.plan.layers:
            padded = np.pad(self.gradients[layer.index], ((0, 0), (0, K_TILE * self.plan.warps * layer.n_tiles)))
            for slot, warp, tile in self.tiles(layer):
                piece = (self.part_offset(slot, warp, self.rank), padded[self.tile_at(layer, tile)])
                self.write([slot % self.plan.blocks], "parts", PARTS, self.step, [piece], TILE_BYTES)
        if self.plan.has_biases:
            piece = (self.bias_offset(self.rank, self.step), self.bias_sums)
            self.write(range(self.plan.blocks), "bias parts", PARTS, self.step, [piece], self.plan.all_units * 4)
        tiles = self.plan.row_tiles
        for m, loss in enumerate([self.total] + [0.0] * (tiles - 1)):
            piece = (self.score_offset(self.rank, m, self.step), np.array([loss, 0, 0, 0]))
            self.write([0], "scores", PARTS, self.step, [piece], SCORE_BYTES)

    def read_parts(self, layer: Layer, slot: int, tile: int) -> Array:
        """The sum over the blocks, in the order of their ranks."""
        if self.plan.blocks == 1:
            return self.gradients[layer.index][self.tile_at(layer, tile)]
        warp = tile // self.plan.layer_slots(layer)
        offsets = [self.part_offset(slot, warp, sender) for sender in range(self.plan.blocks)]
        return sum(
            (self.read("parts", PARTS, self.step, offset, warp) for offset in offsets), np.zeros((N_TILE, K_TILE))
        )

    def step_biases(self) -> None:
        sums = self.bias_sums
        if self.plan.blocks > 1 and self.plan.has_biases:
            offsets = [self.bias_offset(sender, self.step) for sender in range(self.plan.blocks)]
            sums = np.sum([self.read("bias parts", PARTS, self.step, offset, 0) for offset in offsets], axis=0)
        self.bias_states = self.task.momentum * self.bias_states + sums * self.has_bias
        self.biases -= self.task.lr * self.bias_states
