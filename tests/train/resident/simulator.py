"""Executes a Plan in NumPy, block by block and phase by phase, in any order that the plan's waits allow.

The phases are those the kernel is written from (`source.phase_names`), in float64; so are ownership, addresses, buffers and the
bytes a wait counts. What lies within a block (warps' partial sums, registers) is one matrix here. A number split into planes is
spread evenly over them, so that a plane forgotten or read twice shows.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import onelaunch as ol
from onelaunch.train.engines.resident.plan import ROW_TILE, STEP, TILE, WARPS, Layer, Plan
from onelaunch.train.engines.resident.source import phase_names, source_of
from tests.train.resident.fragments import BYTES, Array, Clock, RaceError, Slots

Ready = Callable[[], bool]
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


class Block:
    """One thread block: its own memory, its place in the run, its phases."""

    def __init__(self, simulation: Simulation, rank: int) -> None:
        self.all, self.plan, self.task, self.rank = simulation, simulation.plan, simulation.task, rank
        self.clock = Clock(self.plan.blocks, rank)
        self.shared = Slots(self.plan.shared)
        self.passes = self.backs = self.step = 0
        self.awaited: set[tuple[int, int]] = set()  # (exchange, use)
        self.masters: list[Array] = []
        self.biases: list[Array] = []
        for layer, weight, bias in zip(self.plan.layers, self.task.weights, self.task.biases, strict=True):
            held = layer.units if layer.last else layer.units * self.plan.blocks
            whole = np.pad(weight, ((0, held - len(weight)), (0, layer.steps * STEP - weight.shape[1])))
            self.masters.append(whole[self.owned(layer)].copy())
            self.biases.append(np.pad(bias, (0, held - len(bias)))[self.owned(layer)].copy())
        self.states = [(np.zeros_like(w), np.zeros_like(b)) for w, b in zip(self.masters, self.biases, strict=True)]
        self.sums = [(np.zeros_like(w), np.zeros_like(b)) for w, b in zip(self.masters, self.biases, strict=True)]
        self.slopes: dict[int, Array] = {}
        self.deltas: dict[int, Array] = {}
        self.inputs: list[tuple[int, Array]] = [(-1, np.empty(0))] * self.plan.input_buffers
        self.losses: list[float] = []

    def owned(self, layer: Layer) -> slice:
        """Units of a layer that are this block's; the last layer is everyone's."""
        first = 0 if layer.last else self.rank * layer.units
        return slice(first, first + layer.units)

    # The run.

    def run(self) -> Iterator[Ready | None]:
        plan, task = self.plan, self.task
        for layer in plan.layers[1:]:
            self.send_back(layer, 0)
        for step in range(task.steps):
            rows, total = task.rows(step, plan.settings.batch), 0.0
            for first in range(0, len(rows), plan.rows):
                self.part, self.count = rows[first : first + plan.rows], len(rows)
                self.first, self.last = first == 0, first + plan.rows >= len(rows)
                yield from self.run_phases(self.all.phases)
                total += self.loss
                self.backs += 1
            self.losses.append(total)
            self.step += 1
            for _ in range(task.checks if step % 2 else 0):
                self.part = np.arange(min(plan.rows, len(task.x)))
                self.count = len(self.part)
                yield from self.run_phases(self.all.forward_phases)

    def run_phases(self, phases: Sequence[str]) -> Iterator[Ready | None]:
        self.fetch()
        for phase in phases:
            found = re.fullmatch(r"(.*?)(?: (\d+))?", phase)
            assert found is not None
            if found[2] is None:
                assert found[1] in ("rows arrive", "fetch the next rows"), phase  # within a block, see `fetch`
                continue
            method = getattr(self, found[1].replace(" ", "_"))
            yield from method(self.plan.layers[int(found[2])])
            yield None
        self.passes += 1

    def fetch(self) -> None:
        x = self.task.x[self.part]
        padded = np.zeros((self.plan.rows, self.plan.layers[0].steps * STEP))
        padded[: len(x), : x.shape[1]] = x
        self.inputs[self.passes % self.plan.input_buffers] = (self.passes, padded)

    # Forward.

    def read_inputs(self, layer: Layer, rows: range) -> Array:
        """What the layer multiplies, of these row tiles."""
        if not layer.first:
            before = self.plan.layers[layer.index - 1]
            stride = (self.plan.out_buffers(before) - 1) * self.plan.out_bytes(before)
            exchange = self.plan.values_exchange(before)
            return self.read_left(before, "values of all", exchange, self.passes, stride, rows)
        number, values = self.inputs[self.passes % self.plan.input_buffers]
        assert number == self.passes
        return values[rows.start * ROW_TILE : rows.stop * ROW_TILE]

    def sum_up(self, layer: Layer, rows: range) -> tuple[Array, Array]:
        """Values and slopes of this block's units of a layer, before what lies beyond the last unit is cleared."""
        z = self.read_inputs(layer, rows) @ self.masters[layer.index].T + self.biases[layer.index]
        self.clock.meet()
        slope = np.ones_like(z)
        for operation in layer.stage.chain:
            z, factor = ACTIVATIONS[operation.name](z)  # type: ignore[union-attr]
            slope *= factor
        return z, slope

    def forward(self, layer: Layer) -> Iterator[None]:
        real = np.arange(*self.owned(layer).indices(10**9)) < layer.stage.linear.outputs
        slopes = []
        stride = (self.plan.out_buffers(layer) - 1) * self.plan.out_bytes(layer)
        for rows in self.groups():
            z, slope = self.sum_up(layer, rows)
            slopes.append(slope * real)
            self.publish(layer, "values of all", self.plan.values_exchange(layer), self.passes, stride, rows, z * real)
            yield None
        self.slopes[layer.index] = np.concatenate(slopes)
        self.raise_flag(self.plan.values_exchange(layer), self.passes)

    def outputs(self, layer: Layer) -> Iterator[None]:
        z, slope = (
            np.concatenate(parts) for parts in zip(*(self.sum_up(layer, r) for r in self.groups()), strict=True)
        )
        width, rows = layer.stage.linear.outputs, len(self.part)
        real, target = z[:rows, :width], self.task.y[self.part]
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
            if layer.last:
                deltas = self.deltas[layer.index][rows.start * ROW_TILE : rows.stop * ROW_TILE]
            else:
                deltas = self.read_left(layer, "deltas of all", self.plan.deltas_exchange(layer), self.backs, 0, rows)
            d = deltas @ self.read_back(layer)
            self.clock.meet()
            d = d * self.slopes[before.index][rows.start * ROW_TILE : rows.stop * ROW_TILE]
            parts.append(d)
            if not before.first:
                self.publish(before, "deltas of all", self.plan.deltas_exchange(before), self.backs, 0, rows, d)
            yield None
        self.deltas[before.index] = np.concatenate(parts)
        if not before.first:
            self.raise_flag(self.plan.deltas_exchange(before), self.backs)

    def update(self, layer: Layer) -> Iterator[None]:
        delta = self.deltas[layer.index]
        inputs = self.read_inputs(layer, range(self.plan.row_tiles))
        gradients = (delta.T @ inputs, delta.sum(axis=0) * layer.stage.linear.bias)
        if not self.first:
            gradients = tuple(a + b for a, b in zip(gradients, self.sums[layer.index], strict=True))
        self.sums[layer.index] = gradients
        if self.last:
            held = (self.masters[layer.index], self.biases[layer.index])
            for weight, gradient, state in zip(held, gradients, self.states[layer.index], strict=True):
                state[:] = self.task.momentum * state + gradient
                weight -= self.task.lr * state
            if not layer.first:
                self.send_back(layer, self.step + 1)
        yield None

    # The weights that the way back multiplies by: kept by the owners of a layer's inputs, sent by the owners of its units.

    def back_stride(self, layer: Layer) -> int:
        return 0 if layer.last else self.plan.back_bytes(layer)

    def back_offset(self, layer: Layer, to: int, use: int, plane: int, tile: int, place: int) -> int:
        """`tile`: of eight inputs, among the receiver's; `place`: of a tile of units among all."""
        slot = (use & 1) * self.back_stride(layer)
        if not self.all.slots_shared and not layer.last:
            slot += to * 2 * self.plan.back_bytes(layer)
        return slot + ((plane * layer.input_tiles + tile) * layer.output_steps * 2 + place) * BYTES

    def send_back(self, layer: Layer, use: int) -> None:
        stamp = self.clock.tick()
        masters, planes = self.masters[layer.index], self.plan.planes
        first = 0 if layer.last else self.rank * layer.tiles
        for tile in range(layer.steps * 2):
            to = tile // layer.input_tiles
            if to >= self.plan.blocks or (layer.last and to != self.rank):
                continue
            for n in range(layer.tiles):
                values = masters[n * TILE :][:TILE, tile * TILE :][:, :TILE].T / planes
                for plane in range(planes):
                    offset = self.back_offset(layer, to, use, plane, tile % layer.input_tiles, first + n)
                    slots = self.all.slots_of(to) if not layer.last else self.shared
                    slots.write(f"layer {layer.index}: weights back", offset, values, use, self.clock)
                    if not layer.last:
                        self.all.arrive(to, self.plan.back_exchange(layer), use, stamp)

    def read_back(self, layer: Layer) -> Array:
        """[units of the layer, this block's inputs of it]."""
        found = np.zeros((layer.output_steps * STEP, layer.input_tiles * TILE))
        slots = self.shared if layer.last else self.all.slots_of(self.rank)
        awaited = layer.last or self.has_waited(self.plan.back_exchange(layer), self.step)
        real = layer.tiles * (1 if layer.last else self.plan.blocks)
        for plane in range(self.plan.planes):
            for tile in range(layer.input_tiles):
                for place in range(real):
                    offset = self.back_offset(layer, self.rank, self.step, plane, tile, place)
                    name, warp = f"layer {layer.index}: weights back", place // 2 % WARPS
                    values = slots.read(name, offset, self.step, self.clock, warp, awaited=awaited)
                    found[place * TILE :][:TILE, tile * TILE :][:, :TILE] += values.T
        return found

    # Exchanges.

    def groups(self) -> Iterator[range]:
        """Row tiles multiplied at once."""
        return (range(first, first + self.plan.group) for first in range(0, self.plan.row_tiles, self.plan.group))

    def left_offset(self, layer: Layer, plane: int, row_tile: int, place: int, half: int) -> int:
        index = (plane * self.plan.row_tiles + row_tile) * layer.output_steps + place // 2
        return index * 4 * BYTES + place % 2 * 2 * BYTES + half * BYTES

    def publish(
        self, layer: Layer, what: str, exchange: int, use: int, stride: int, rows: range, values: Array
    ) -> None:
        """This block's units, of these row tiles, into everyone's slot."""
        stamp = self.clock.tick()
        spread = values / self.plan.planes
        for slots, receivers in self.all.slots_of_all():
            for plane in range(self.plan.planes):
                for i, row_tile in enumerate(rows):
                    for n in range(layer.tiles):
                        for half in range(2):
                            piece = spread[i * ROW_TILE + half * TILE :][:TILE, n * TILE :][:, :TILE]
                            offset = self.left_offset(layer, plane, row_tile, self.rank * layer.tiles + n, half)
                            name = f"layer {layer.index}: {what}"
                            slots.write(name, (use & 1) * stride + offset, piece, use, self.clock)
                            for to in receivers:
                                self.all.arrive(to, exchange, use, stamp)

    def read_left(self, layer: Layer, what: str, exchange: int, use: int, stride: int, rows: range) -> Array:
        """Everyone's units, of these row tiles; the step of a unit decides which warp reads it."""
        found = np.zeros((len(rows) * ROW_TILE, layer.output_steps * STEP))
        slots, awaited = self.all.slots_of(self.rank), self.has_waited(exchange, use)
        for plane in range(self.plan.planes):
            for i, row_tile in enumerate(rows):
                for place in range(layer.tiles * self.plan.blocks):
                    for half in range(2):
                        offset = (use & 1) * stride + self.left_offset(layer, plane, row_tile, place, half)
                        name, warp = f"layer {layer.index}: {what}", place // 2 % WARPS
                        values = slots.read(name, offset, use, self.clock, warp, awaited=awaited)
                        found[i * ROW_TILE + half * TILE :][:TILE, place * TILE :][:, :TILE] += values
        return found

    def raise_flag(self, exchange: int, use: int) -> None:
        self.clock.meet()
        self.all.flags[exchange, self.rank, use] = self.clock.tick()

    def has_waited(self, exchange: int, use: int) -> bool:
        return not self.plan.cluster or (exchange, use) in self.awaited

    def wait(self, exchange: int, use: int, layer: Layer) -> Iterator[Ready]:
        """Until every byte of a use of an exchange is here; in a grid a warp waits for the writers of what it reads."""
        everything, plan = self.all, self.plan
        if plan.blocks == 1:
            return
        if plan.cluster:
            yield lambda: everything.received[self.rank, exchange, use] >= everything.expected[exchange]
            if everything.received[self.rank, exchange, use] > everything.expected[exchange]:
                raise RaceError(f"exchange {exchange}, use {use}: more bytes came than are waited for")
            self.clock.learn(everything.stamps[self.rank, exchange, use])
            self.awaited.add((exchange, use))
            return
        for warp in range(WARPS):
            steps = range(warp, layer.output_steps, WARPS)[: everything.flags_a_warp // 2]
            for writer in sorted({(step * 2 + odd) // layer.tiles for step in steps for odd in (0, 1)}):
                if writer < plan.blocks:
                    yield lambda writer=writer: (exchange, writer, use) in everything.flags  # type: ignore[misc]
                    self.clock.learn(everything.flags[exchange, writer, use], warp)

    def wait_for_values(self, layer: Layer) -> Iterator[Ready]:
        return self.wait(self.plan.values_exchange(layer), self.passes, layer)

    def wait_for_deltas(self, layer: Layer) -> Iterator[Ready]:
        yield from self.wait(self.plan.deltas_exchange(layer), self.backs, layer)
        if self.plan.cluster and self.first:  # in a grid the deltas' flags were raised after the weights were sent
            yield from self.wait(self.plan.back_exchange(layer), self.step, layer)


class Simulation:
    """All blocks. `phases` of a training pass, where a test wants others than the plan's; `flags_a_warp`: lanes that wait."""

    def __init__(self, plan: Plan, task: Task, *, phases: Sequence[str] | None = None, flags_a_warp: int = 32) -> None:
        self.plan, self.task, self.flags_a_warp = plan, task, flags_a_warp
        self.phases = list(phases or phase_names(plan))
        self.forward_phases = self.phases[: 1 + next(i for i, p in enumerate(self.phases) if p.startswith("outputs"))]
        self.slots_shared = plan.blocks == 1 or plan.cluster
        self.expected = {int(i): int(n) for i, n in re.findall(r"i == (\d+) \? (\d+)", source_of(plan))}
        self.received: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self.stamps: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
        self.flags: dict[tuple[int, int, int], npt.NDArray[np.int64]] = {}
        self.shared_by_all = Slots(plan.exchange)
        self.blocks = [Block(self, rank) for rank in range(plan.blocks)]

    def slots_of(self, rank: int) -> Slots:
        return self.blocks[rank].shared if self.slots_shared else self.shared_by_all

    def slots_of_all(self) -> Iterator[tuple[Slots, list[int]]]:
        """Every memory a published value goes to, and whose it is."""
        if self.slots_shared:
            yield from ((block.shared, [block.rank]) for block in self.blocks)
        else:
            yield self.shared_by_all, []

    def arrive(self, to: int, exchange: int, use: int, stamp: npt.NDArray[np.int64]) -> None:
        key = to, exchange, use
        self.received[key] += BYTES
        self.stamps[key] = np.maximum(self.stamps.get(key, stamp), stamp)

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
        """Of each layer, collected from the owners; what every block holds must be the same everywhere."""
        found = []
        for layer in self.plan.layers:
            parts = [(block.masters[layer.index], block.biases[layer.index]) for block in self.blocks]
            if layer.last:
                assert all(np.array_equal(part[0], parts[0][0]) for part in parts)
                parts = parts[:1]
            linear = layer.stage.linear
            whole, bias = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
            found.append((whole[: linear.outputs, : linear.inputs], bias[: linear.outputs]))
        return found
