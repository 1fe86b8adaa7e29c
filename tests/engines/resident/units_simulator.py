"""A block of a plan by units: it owns units of every layer, and the blocks exchange values and deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.settings import K_TILE, N_TILE, ROW_TILE, SCORE_BYTES, WARPS
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from tests.engines.resident.exchanges import Piece, Ready, Wires
from tests.engines.resident.fragments import BYTES, Array
from tests.engines.resident.running import Runner, Task, chain, loss_of


class UnitsBlock(Runner):
    plan: UnitsPlan

    def __init__(
        self, wires: Wires, task: Task, phases: Sequence[str], forward_phases: Sequence[str], rank: int
    ) -> None:
        super().__init__(wires, task, phases, forward_phases, rank)
        self.masters: list[Array] = []
        self.biases: list[Array] = []
        for layer, weight, bias in zip(self.plan.layers, self.task.weights, self.task.biases, strict=True):
            units, inputs = owned(layer, rank)
            whole = np.pad(
                weight, ((0, units.stop), (0, inputs.stop))
            )  # zeros wherever a tile has no real unit or input
            self.masters.append(whole[units, inputs].copy())
            self.biases.append(np.pad(bias, (0, units.stop))[units].copy())
        self.states = [(np.zeros_like(w), np.zeros_like(b)) for w, b in zip(self.masters, self.biases, strict=True)]
        self.sums = list(self.states)
        self.late = False  # whether the update of the second layer is still to be made
        self.slopes: dict[int, Array] = {}
        self.deltas: dict[int, Array] = {}

    def begin(self) -> Iterator[Ready | None]:
        for layer in self.plan.layers[1:]:
            self.send_weights(layer, 0)
        self.own_values = np.empty(0)  # of the last hidden layer, where it is not published
        yield None

    def collect(self, layer: Layer, weight: Array, bias: Array) -> None:
        units, inputs = owned(layer, self.rank)
        weight[units, inputs], bias[units] = self.masters[layer.index], self.biases[layer.index]

    def groups(self) -> Iterator[range]:
        """Groups of row tiles that are multiplied at once."""
        return (
            range(first, first + self.plan.row_tiles_at_once)
            for first in range(0, self.plan.row_tiles, self.plan.row_tiles_at_once)
        )

    # Forward.

    def read_inputs(self, layer: Layer, rows: range, passes: int) -> Array:
        """The inputs of a layer in a pass, of these row tiles."""
        if not layer.first:
            before = self.plan.layers[layer.index - 1]
            exchange, stride = self.plan.values_exchange(before), self.out_stride(before)
            return self.read_left(before, "values of all", exchange, passes, stride, rows)
        return self.fetched()[0][rows.start * ROW_TILE : rows.stop * ROW_TILE]

    def out_stride(self, layer: Layer) -> int:
        return (self.plan.out_buffers(layer) - 1) * self.plan.out_bytes(layer)

    def sum_up(self, layer: Layer, rows: range) -> tuple[Array, Array]:
        """Values and slopes of the units that this block computes of a layer."""
        weights = self.read_copies(layer) if layer.owned_by_input else self.masters[layer.index]
        z = self.read_inputs(layer, rows, self.passes) @ weights.T + self.biases[layer.index]
        self.clock.meet()
        return chain(layer, z)

    def forward(self, layer: Layer) -> Iterator[None]:
        real = np.arange(layer.units) + self.rank * layer.units < layer.stage.linear.outputs
        slopes, values, exchange = list[Array](), list[Array](), self.plan.values_exchange(layer)
        for rows in self.groups():
            z, slope = self.sum_up(layer, rows)
            slopes.append(slope * real)
            values.append(z * real)
            if self.plan.publishes(layer):
                self.publish(layer, "values of all", exchange, self.passes, self.out_stride(layer), rows, values[-1])
            yield None
        self.slopes[layer.index] = np.concatenate(slopes)
        if not self.plan.publishes(layer):
            self.own_values = np.concatenate(values)
            if self.plan.outputs_at_once:
                yield from self.partial_outputs(self.plan.layers[-1])
        self.raise_flag(exchange, self.passes)

    def outputs(self, layer: Layer) -> Iterator[None]:
        sums = [self.sum_up(layer, rows) for rows in self.groups()]
        z, slope = (np.concatenate(parts) for parts in zip(*sums, strict=True))
        loss, delta = loss_of(self.plan, z, self.fetched()[1], self.count)
        self.total += loss
        self.deltas[layer.index] = delta * slope
        yield None

    # The last layer in a cluster: partial outputs go to the rows' owners, which send the gradient to all.

    def rows_of(self, rank: int) -> range:
        each = self.plan.rows_per_block
        return range(min(rank * each, self.plan.rows), min((rank + 1) * each, self.plan.rows))

    def partial_outputs(self, layer: Layer) -> Iterator[None]:
        sums, exchange = self.own_values @ self.masters[layer.index].T, self.plan.values_exchange(self.plan.layers[-2])
        for owner in range(self.plan.blocks):
            rows, line = self.rows_of(owner), layer.units * 4
            if rows:
                piece = (self.rank * self.plan.rows_per_block * line, sums[rows.start : rows.stop])
                name = f"layer {layer.index}: partial outputs"
                self.write([owner], name, exchange, self.passes, [piece], len(rows) * line)
            yield None

    def wait_for_partial_outputs(self, layer: Layer) -> Iterator[Ready]:
        return self.wait(self.plan.values_exchange(self.plan.layers[-2]), self.passes, layer)

    def loss(self, layer: Layer) -> Iterator[None]:
        rows, name, use = self.rows_of(self.rank), f"layer {layer.index}: ", self.passes
        exchange, line = self.plan.values_exchange(self.plan.layers[-2]), self.plan.rows_per_block * layer.units * 4
        loss = 0.0
        if rows:
            parts = range(self.plan.blocks)
            z = sum((self.read(name + "partial outputs", exchange, use, part * line, 0) for part in parts), 0.0)
            value, slope = chain(layer, z + self.biases[layer.index])
            loss, delta = loss_of(self.plan, value, self.fetched()[1][rows.start : rows.stop], self.count)
            pieces = [
                (self.delta_offset(layer, plane, row, n), (delta * slope)[i, n * N_TILE :][:N_TILE] / self.plan.planes)
                for plane, (i, row), n in product(range(self.plan.planes), enumerate(rows), range(layer.n_tiles))
            ]
            self.write(parts, name + "deltas", self.plan.last_exchange, use, pieces, 16)
        yield None
        for warp in range(self.plan.score_warps):
            piece = ((self.rank * self.plan.score_warps + warp) * SCORE_BYTES, np.array([loss * (warp == 0)]))
            self.write([0], "losses", self.plan.last_exchange, use, [piece], SCORE_BYTES)

    def delta_offset(self, layer: Layer, plane: int, row: int, n: int) -> int:
        tile = (plane * self.plan.row_tiles + row // ROW_TILE) * layer.n_tiles + n
        return tile * 2 * BYTES + row % ROW_TILE * 16

    def wait_for_outputs(self, layer: Layer) -> Iterator[Ready]:
        return self.wait(self.plan.last_exchange, self.passes, layer)

    def output_deltas(self, layer: Layer) -> Array:
        found, name = np.zeros((self.plan.rows, layer.units)), f"layer {layer.index}: deltas"
        for plane, row, n in product(range(self.plan.planes), range(self.plan.rows), range(layer.n_tiles)):
            offset = self.delta_offset(layer, plane, row, n)
            found[row, n * N_TILE :][:N_TILE] += self.read(name, self.plan.last_exchange, self.passes, offset, 0)
        return found

    def sum_the_loss(self, layer: Layer) -> Iterator[None]:
        """Every block has the whole loss, or block 0 adds it up."""
        for score in range(self.plan.blocks * self.plan.score_warps if self.plan.sums_outputs and not self.rank else 0):
            self.total += float(self.read("losses", self.plan.last_exchange, self.passes, score * SCORE_BYTES, 0)[0])
        self.late = self.plan.late_update
        yield None

    # Backward.

    def back(self, layer: Layer) -> Iterator[None]:
        """From the deltas of a layer to those of the layer before."""
        before = self.plan.layers[layer.index - 1]
        parts = []
        if layer.last and self.plan.sums_outputs:
            self.deltas[layer.index] = self.output_deltas(layer)
        for rows in self.groups():
            span = slice(rows.start * ROW_TILE, rows.stop * ROW_TILE)
            if layer.last:
                d = self.deltas[layer.index][span] @ self.masters[layer.index]
            else:
                exchange = self.plan.deltas_exchange(layer)
                d = self.read_left(layer, "deltas of all", exchange, self.backs, 0, rows) @ self.read_back(layer)
            self.clock.meet()
            parts.append(d * self.slopes[before.index][span])
            if not before.first:
                exchange = self.plan.deltas_exchange(before)
                self.publish(before, "deltas of all", exchange, self.backs, 0, rows, parts[-1])
            yield None
        self.deltas[before.index] = np.concatenate(parts)
        if not before.first:
            self.raise_flag(self.plan.deltas_exchange(before), self.backs)

    def update(self, layer: Layer) -> Iterator[None]:
        return self.step_layer(layer, self.passes, self.step + 1)

    def late_update(self, layer: Layer) -> Iterator[None]:
        if self.late:
            yield from self.step_layer(layer, self.passes - 1, self.step + self.trained)
        self.late = False

    def end(self) -> Iterator[None]:
        if self.late:
            yield from self.late_update(self.plan.layers[1])

    def step_layer(self, layer: Layer, passes: int, use: int) -> Iterator[None]:
        """The update by the gradient of a pass. `use`: the number of the update, and of the copies of the new weights."""
        delta = self.deltas[layer.index]
        if layer.last and self.plan.sums_outputs:
            inputs = self.own_values
        else:
            inputs = self.read_inputs(layer, range(self.plan.row_tiles), passes)[:, owned(layer, self.rank)[1]]
        gradients = (delta.T @ inputs, delta.sum(axis=0) * layer.stage.linear.bias)
        if not self.first:
            before = self.sums[layer.index]
            gradients = (gradients[0] + before[0], gradients[1] + before[1])
        self.sums[layer.index] = gradients
        if self.last:
            held = (self.masters[layer.index], self.biases[layer.index])
            for weight, gradient, state in zip(held, gradients, self.states[layer.index], strict=True):
                state[:] = self.task.momentum * state + gradient
                weight -= self.task.lr * state
            if not layer.first:
                self.send_weights(layer, use)
        yield None

    # Weights that other blocks need: of a hidden layer those of their own units, for the backward pass; of the last layer all.

    def send_weights(self, layer: Layer, use: int) -> None:
        if not layer.owned_by_input:
            self.send_back(layer, use)
        elif not self.plan.sums_outputs:
            self.send_copies(layer, use)

    def back_offset(self, layer: Layer, to: int, use: int, plane: int, tile: int, unit_tile: int) -> int:
        """`tile`: of eight inputs, among the receiver's; `unit_tile`: of eight units, among those of all blocks."""
        slot = (use & 1) + (0 if self.wires.near else to * 2)
        index = (plane * layer.input_tiles + tile) * layer.next_k_tiles * 2 + unit_tile
        return slot * self.plan.back_bytes(layer) + index * BYTES

    def send_back(self, layer: Layer, use: int) -> None:
        masters, name = self.masters[layer.index], f"layer {layer.index}: weights back"
        for to in range(self.plan.blocks):
            pieces: list[Piece] = []
            for plane, tile, n in product(range(self.plan.planes), range(layer.input_tiles), range(layer.n_tiles)):
                column = (to * layer.input_tiles + tile) * N_TILE
                offset = self.back_offset(layer, to, use, plane, tile, self.rank * layer.n_tiles + n)
                pieces.append((offset, masters[n * N_TILE :][:N_TILE, column:][:, :N_TILE].T / self.plan.planes))
            self.write([to], name, self.plan.back_exchange(layer), use, pieces)

    def read_back(self, layer: Layer) -> Array:
        """The weights [units of the layer, inputs that this block owns]."""
        found = np.zeros((layer.next_k_tiles * K_TILE, layer.input_tiles * N_TILE))
        exchange, name = self.plan.back_exchange(layer), f"layer {layer.index}: weights back"
        unit_tiles = range(layer.n_tiles * self.plan.blocks)
        for plane, tile, unit_tile in product(range(self.plan.planes), range(layer.input_tiles), unit_tiles):
            offset = self.back_offset(layer, self.rank, self.step, plane, tile, unit_tile)
            values = self.read(name, exchange, self.step, offset, unit_tile // 2 % WARPS)
            found[unit_tile * N_TILE :][:N_TILE, tile * N_TILE :][:, :N_TILE] += values.T
        return found

    def copy_offset(self, layer: Layer, use: int, plane: int, n: int, input_tile: int) -> int:
        """`n`: tile of outputs; `input_tile`: of eight inputs, among those of all blocks."""
        return (use & 1) * self.plan.copies_bytes() + (
            (plane * layer.n_tiles + n) * layer.k_tiles * 2 + input_tile
        ) * BYTES

    def send_copies(self, layer: Layer, use: int) -> None:
        masters, pieces = self.masters[layer.index], list[Piece]()
        for plane, n, tile in product(range(self.plan.planes), range(layer.n_tiles), range(layer.input_tiles)):
            offset = self.copy_offset(layer, use, plane, n, self.rank * layer.input_tiles + tile)
            pieces.append((offset, masters[n * N_TILE :][:N_TILE, tile * N_TILE :][:, :N_TILE] / self.plan.planes))
        receivers = range(self.plan.blocks)
        self.write(receivers, f"layer {layer.index}: weights of all", self.plan.last_exchange, use, pieces)

    def read_copies(self, layer: Layer) -> Array:
        found = np.zeros((layer.units, layer.k_tiles * K_TILE))
        name, input_tiles = f"layer {layer.index}: weights of all", range(layer.input_tiles * self.plan.blocks)
        use = self.step + self.trained
        for plane, n, input_tile in product(range(self.plan.planes), range(layer.n_tiles), input_tiles):
            offset = self.copy_offset(layer, use, plane, n, input_tile)
            values = self.read(name, self.plan.last_exchange, use, offset, input_tile // 2 % WARPS)
            found[n * N_TILE :][:N_TILE, input_tile * N_TILE :][:, :N_TILE] += values
        return found

    # Waits. In a grid, the flags of values and deltas are raised after the weights are sent, and cover them.

    def wait_for_values(self, layer: Layer) -> Iterator[Ready]:
        return self.wait(self.plan.values_exchange(layer), self.passes, layer)

    def wait_for_deltas(self, layer: Layer) -> Iterator[Ready]:
        yield from self.wait(self.plan.deltas_exchange(layer), self.backs, layer)
        if self.plan.cluster and self.first:
            yield from self.wait(self.plan.back_exchange(layer), self.step, layer)


def owned(layer: Layer, rank: int) -> tuple[slice, slice]:
    """The weights that a block owns, as [units, inputs]. Of the last of several layers it owns those of its own inputs."""
    units, inputs = slice(rank * layer.units, (rank + 1) * layer.units), slice(0, layer.k_tiles * K_TILE)
    if not layer.last:
        return units, inputs
    width = layer.input_tiles * N_TILE
    return slice(0, layer.units), slice(rank * width, (rank + 1) * width) if layer.owned_by_input else inputs
