"""Executes a Plan in NumPy, block by block and phase by phase, in any order that the plan's waits allow.

The phases are those the kernel is written from (`source.phase_names`), in float64; so are ownership, addresses, buffers and the
bytes a wait counts. What lies within a block (warps' partial sums, registers) is one matrix here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

import onelaunch as ol
from onelaunch.train.engines.resident.plan import ROW_TILE, STEP, TILE, WARPS, Layer, Plan
from onelaunch.train.engines.resident.source import phase_names
from tests.train.resident.exchanges import Piece, Port, Ready, Wires
from tests.train.resident.fragments import BYTES, Array, RaceError

ACTIVATIONS: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "relu": lambda z: (np.maximum(z, 0), (z > 0).astype(np.float64)),
    "tanh": lambda z: (np.tanh(z), 1 - np.tanh(z) ** 2),
}


@dataclass
class Task:
    """What is trained on what; weights and biases by layer, as PyTorch shapes them."""

    weights: list[Array]
    biases: list[Array]
    x: Array
    y: npt.NDArray[np.generic]
    lr: float
    momentum: float = 0.0
    seed: int = 0
    steps: int = 5
    checks: int = 0  # forward passes without a backward one after every second step: validation

    def rows(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        each = -(-len(self.x) // batch)
        order = ol.permutation(len(self.x), self.seed, step // each).numpy()
        return order[step % each * batch :][:batch]


class Block(Port):
    """One thread block: its own memory, its place in the run, its phases."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        super().__init__(simulation.wires, rank)
        self.phases, self.forward_phases, self.task = simulation.phases, simulation.forward_phases, simulation.task
        self.passes = self.backs = self.step = 0
        self.rows_used = -1  # the pass whose rows are no longer needed
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
        self.slopes: dict[int, Array] = {}
        self.deltas: dict[int, Array] = {}
        self.inputs = [(-1, np.empty(0), self.task.y)] * self.plan.input_buffers
        self.losses: list[float] = []

    # The run.

    def run(self) -> Iterator[Ready | None]:
        plan, task = self.plan, self.task
        for layer in plan.layers[1:]:
            self.send_weights(layer, 0)
        for step in range(task.steps):
            rows, total = task.rows(step, plan.settings.batch), 0.0
            for first in range(0, len(rows), plan.rows):
                self.part, self.count = rows[first : first + plan.rows], len(rows)
                self.first, self.last = first == 0, first + plan.rows >= len(rows)
                yield from self.run_phases(self.phases)
                total += self.loss
                self.backs += 1
            self.losses.append(total)
            self.step += 1
            for _ in range(task.checks if step % 2 else 0):
                self.part = np.arange(min(plan.rows, len(task.x)))
                self.count, self.rows_used = len(self.part), self.passes  # nothing comes back for these rows
                yield from self.run_phases(self.forward_phases)

    def run_phases(self, phases: Sequence[str]) -> Iterator[Ready | None]:
        for phase in phases:
            found = re.fullmatch(r"(.*?)(?: (\d+))?", phase)
            assert found is not None
            method = getattr(self, found[1].replace(" ", "_"))
            yield from method(self.plan.layers[int(found[2] or 0)])
            yield None
        self.passes += 1

    def rows_arrive(self, layer: Layer) -> Iterator[None]:
        x = self.task.x[self.part]
        padded = np.pad(x, ((0, self.plan.rows - len(x)), (0, layer.steps * STEP - x.shape[1])))
        self.inputs[self.passes % self.plan.input_buffers] = (self.passes, padded, self.task.y[self.part])
        yield None

    def fetch_the_next_rows(self, layer: Layer) -> Iterator[None]:
        """Into the other buffer. Where there is one: into it, as soon as the pass needs no more of it."""
        if self.plan.input_buffers == 2 or self.rows_used == self.passes:
            self.inputs[(self.passes + 1) % self.plan.input_buffers] = (-1, np.empty(0), np.empty(0))
        yield None

    def fetched(self) -> tuple[Array, npt.NDArray[np.generic]]:
        """Rows and targets of this pass."""
        number, x, y = self.inputs[self.passes % self.plan.input_buffers]
        if number != self.passes:
            raise RaceError(f"block {self.rank} needs the rows of pass {self.passes}, others are on their way there")
        return x, y

    def groups(self) -> Iterator[range]:
        """Row tiles multiplied at once."""
        return (range(first, first + self.plan.group) for first in range(0, self.plan.row_tiles, self.plan.group))

    # Forward.

    def read_inputs(self, layer: Layer, rows: range) -> Array:
        """What the layer multiplies, of these row tiles."""
        if not layer.first:
            before = self.plan.layers[layer.index - 1]
            exchange, stride = self.plan.values_exchange(before), self.out_stride(before)
            return self.read_left(before, "values of all", exchange, self.passes, stride, rows)
        return self.fetched()[0][rows.start * ROW_TILE : rows.stop * ROW_TILE]

    def out_stride(self, layer: Layer) -> int:
        return (self.plan.out_buffers(layer) - 1) * self.plan.out_bytes(layer)

    def sum_up(self, layer: Layer, rows: range) -> tuple[Array, Array]:
        """Values and slopes of the units this block computes of a layer."""
        weights = self.read_copies(layer) if layer.owned_by_input else self.masters[layer.index]
        z = self.read_inputs(layer, rows) @ weights.T + self.biases[layer.index]
        self.clock.meet()
        slope = np.ones_like(z)
        for operation in layer.stage.chain:
            z, factor = ACTIVATIONS[operation.name](z)  # type: ignore[union-attr]
            slope *= factor
        return z, slope

    def forward(self, layer: Layer) -> Iterator[None]:
        real = np.arange(layer.units) + self.rank * layer.units < layer.stage.linear.outputs
        slopes, exchange = [], self.plan.values_exchange(layer)
        for rows in self.groups():
            z, slope = self.sum_up(layer, rows)
            slopes.append(slope * real)
            self.publish(layer, "values of all", exchange, self.passes, self.out_stride(layer), rows, z * real)
            yield None
        self.slopes[layer.index] = np.concatenate(slopes)
        self.raise_flag(exchange, self.passes)

    def outputs(self, layer: Layer) -> Iterator[None]:
        sums = [self.sum_up(layer, rows) for rows in self.groups()]
        z, slope = (np.concatenate(parts) for parts in zip(*sums, strict=True))
        width, rows = layer.stage.linear.outputs, len(self.part)
        real, target = z[:rows, :width], self.fetched()[1]
        delta = np.zeros_like(z)
        if self.plan.settings.loss == "cross_entropy":
            exponents = np.exp(real - real.max(axis=1, keepdims=True))
            shares = exponents / exponents.sum(axis=1, keepdims=True)
            chosen = np.eye(width)[target.astype(np.int64)]
            self.loss = float(-np.log((shares * chosen).sum(axis=1)).sum() / self.count)
            delta[:rows, :width] = (shares - chosen) / self.count
        else:
            off = real - target
            self.loss = float((off**2).sum() / (self.count * width))
            delta[:rows, :width] = 2 * off / (self.count * width)
        self.deltas[layer.index] = delta * slope
        yield None

    # Backward.

    def back(self, layer: Layer) -> Iterator[None]:
        """From the deltas of a layer to those of the one before it."""
        before = self.plan.layers[layer.index - 1]
        parts = []
        for rows in self.groups():
            here = slice(rows.start * ROW_TILE, rows.stop * ROW_TILE)
            if layer.last:
                d = self.deltas[layer.index][here] @ self.masters[layer.index]
            else:
                exchange = self.plan.deltas_exchange(layer)
                d = self.read_left(layer, "deltas of all", exchange, self.backs, 0, rows) @ self.read_back(layer)
            self.clock.meet()
            parts.append(d * self.slopes[before.index][here])
            if not before.first:
                exchange = self.plan.deltas_exchange(before)
                self.publish(before, "deltas of all", exchange, self.backs, 0, rows, parts[-1])
            yield None
        self.deltas[before.index] = np.concatenate(parts)
        if not before.first:
            self.raise_flag(self.plan.deltas_exchange(before), self.backs)

    def update(self, layer: Layer) -> Iterator[None]:
        delta = self.deltas[layer.index]
        self.rows_used = self.passes if layer.first else self.rows_used
        inputs = self.read_inputs(layer, range(self.plan.row_tiles))[:, owned(layer, self.rank)[1]]
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
                self.send_weights(layer, self.step + 1)
        yield None

    # Weights that others multiply by: of a hidden layer those of a block's inputs, on the way back; of the last layer all.

    def send_weights(self, layer: Layer, use: int) -> None:
        if layer.owned_by_input:
            self.hand_out(layer, use)
        else:
            self.send_back(layer, use)

    def back_offset(self, layer: Layer, to: int, use: int, plane: int, tile: int, place: int) -> int:
        """`tile`: of eight inputs, among the receiver's; `place`: of a tile of units among all."""
        slot = (use & 1) + (0 if self.wires.near else to * 2)
        index = (plane * layer.input_tiles + tile) * layer.output_steps * 2 + place
        return slot * self.plan.back_bytes(layer) + index * BYTES

    def send_back(self, layer: Layer, use: int) -> None:
        masters, name = self.masters[layer.index], f"layer {layer.index}: weights back"
        for to in range(self.plan.blocks):
            pieces: list[Piece] = []
            for plane, tile, n in product(range(self.plan.planes), range(layer.input_tiles), range(layer.tiles)):
                column = (to * layer.input_tiles + tile) * TILE
                offset = self.back_offset(layer, to, use, plane, tile, self.rank * layer.tiles + n)
                pieces.append((offset, masters[n * TILE :][:TILE, column:][:, :TILE].T))
            self.write([to], name, self.plan.back_exchange(layer), use, pieces)

    def read_back(self, layer: Layer) -> Array:
        """[units of the layer, this block's inputs of it]."""
        found = np.zeros((layer.output_steps * STEP, layer.input_tiles * TILE))
        exchange, name = self.plan.back_exchange(layer), f"layer {layer.index}: weights back"
        places = range(layer.tiles * self.plan.blocks)
        for plane, tile, place in product(range(self.plan.planes), range(layer.input_tiles), places):
            offset = self.back_offset(layer, self.rank, self.step, plane, tile, place)
            values = self.read(name, exchange, self.step, offset, place // 2 % WARPS)
            found[place * TILE :][:TILE, tile * TILE :][:, :TILE] += values.T
        return found

    def copy_offset(self, layer: Layer, use: int, plane: int, n: int, place: int) -> int:
        """`n`: tile of outputs; `place`: of a tile of eight inputs among all."""
        return (use & 1) * self.plan.copies_bytes() + ((plane * layer.tiles + n) * layer.steps * 2 + place) * BYTES

    def hand_out(self, layer: Layer, use: int) -> None:
        masters, pieces = self.masters[layer.index], list[Piece]()
        for plane, n, tile in product(range(self.plan.planes), range(layer.tiles), range(layer.input_tiles)):
            offset = self.copy_offset(layer, use, plane, n, self.rank * layer.input_tiles + tile)
            pieces.append((offset, masters[n * TILE :][:TILE, tile * TILE :][:, :TILE]))
        everyone = range(self.plan.blocks)
        self.write(everyone, f"layer {layer.index}: weights of all", self.plan.last_exchange, use, pieces)

    def read_copies(self, layer: Layer) -> Array:
        found = np.zeros((layer.units, layer.steps * STEP))
        name, places = f"layer {layer.index}: weights of all", range(layer.input_tiles * self.plan.blocks)
        for plane, n, place in product(range(self.plan.planes), range(layer.tiles), places):
            offset = self.copy_offset(layer, self.step, plane, n, place)
            values = self.read(name, self.plan.last_exchange, self.step, offset, place // 2 % WARPS)
            found[n * TILE :][:TILE, place * TILE :][:, :TILE] += values
        return found

    # Waits. In a grid, flags of values and deltas are raised after weights were sent, and cover them.

    def wait_for_values(self, layer: Layer) -> Iterator[Ready]:
        return self.wait(self.plan.values_exchange(layer), self.passes, layer)

    def wait_for_deltas(self, layer: Layer) -> Iterator[Ready]:
        yield from self.wait(self.plan.deltas_exchange(layer), self.backs, layer)
        if self.plan.cluster and self.first:
            yield from self.wait(self.plan.back_exchange(layer), self.step, layer)

    def wait_for_weights(self, layer: Layer) -> Iterator[Ready]:
        if self.plan.cluster and (self.plan.last_exchange, self.step) not in self.awaited:
            yield from self.wait(self.plan.last_exchange, self.step, layer)


def owned(layer: Layer, rank: int) -> tuple[slice, slice]:
    """The weights that are a block's: [units, inputs]. Of the last of several layers it owns those of its own inputs."""
    units, inputs = slice(rank * layer.units, (rank + 1) * layer.units), slice(0, layer.steps * STEP)
    if not layer.last:
        return units, inputs
    width = layer.input_tiles * TILE
    return slice(0, layer.units), slice(rank * width, (rank + 1) * width) if layer.owned_by_input else inputs


class Simulation:
    """All blocks. `phases`: of a training pass, where a test wants others than the plan's."""

    def __init__(self, plan: Plan, task: Task, *, phases: Sequence[str] | None = None) -> None:
        self.plan, self.task = plan, task
        self.phases = list(phases or phase_names(plan))
        self.forward_phases = self.phases[: 1 + next(i for i, p in enumerate(self.phases) if p.startswith("outputs"))]
        self.wires = Wires(plan)
        self.blocks = [Block(self, rank) for rank in range(plan.blocks)]

    def run(self, choose: Callable[[list[int]], int]) -> list[float]:
        """Losses by step. `choose` picks the next block among the ranks of those that can go on."""
        running = {block.rank: block.run() for block in self.blocks}
        waits: dict[int, Ready] = {}
        while running:
            able = [rank for rank in running if rank not in waits or waits[rank]()]
            if not able:
                raise RaceError(f"nobody can go on: blocks {sorted(waits)} wait for what never comes")
            rank = choose(able)
            waits.pop(rank, None)
            try:
                ready = next(running[rank])
            except StopIteration:
                del running[rank]
                continue
            if ready is not None:
                waits[rank] = ready
        assert all(block.losses == self.blocks[0].losses for block in self.blocks)
        return self.blocks[0].losses

    def weights(self) -> list[tuple[Array, Array]]:
        """Of each layer, collected from the owners; NaN where nobody owns."""
        found = []
        for layer in self.plan.layers:
            linear = layer.stage.linear
            whole = np.full((layer.units * self.plan.blocks, layer.steps * STEP + STEP), np.nan)
            bias = whole[:, 0].copy()
            for block in self.blocks:
                units, inputs = owned(layer, block.rank)
                whole[units, inputs], bias[units] = block.masters[layer.index], block.biases[layer.index]
            found.append((whole[: linear.outputs, : linear.inputs], bias[: linear.outputs]))
        return found
