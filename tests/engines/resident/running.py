"""What simulated blocks of both kinds of plans share: the run, its rows, the loss."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import onelaunch as ol
from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.settings import K_TILE
from onelaunch.integers import ceil_div
from tests.engines.resident.exchanges import Port, Ready, Wires
from tests.engines.resident.fragments import Array, RaceError

Numbers = npt.NDArray[np.generic]
ACTIVATIONS: dict[str, Callable[[Array], tuple[Array, Array]]] = {
    "relu": lambda z: (np.maximum(z, 0), (z > 0).astype(np.float64)),
    "tanh": lambda z: (np.tanh(z), 1 - np.tanh(z) ** 2),
}


@dataclass
class Task:
    """A training task; weights and biases by layer, in PyTorch's shapes."""

    weights: list[Array]
    biases: list[Array]
    x: Array
    y: npt.NDArray[np.generic]
    lr: float
    momentum: float = 0.0
    seed: int = 0
    steps: int = 5
    validation_passes: int = 0  # after every second step

    def rows(self, step: int, batch: int) -> npt.NDArray[np.int64]:
        each = ceil_div(len(self.x), batch)
        order = ol.permutation(len(self.x), self.seed, step // each).numpy()
        return order[step % each * batch :][:batch]


class Runner(Port, ABC):
    """One thread block: its position in the run and its rows. A subclass has a method for each kind of phase."""

    partitions, partition = 1, 0  # of the rows of a batch, and which one belongs to this block

    def __init__(
        self, wires: Wires, task: Task, phases: Sequence[str], forward_phases: Sequence[str], rank: int
    ) -> None:
        super().__init__(wires, rank)
        self.task, self.phases, self.forward_phases = task, phases, forward_phases
        self.passes = self.backs = self.step = 0
        self.trained = 0  # 1 in validation passes, after the update of the step
        self.inputs = [(-1, np.empty(0), task.y)] * self.plan.input_buffers
        self.losses: list[float] = []

    @abstractmethod
    def begin(self) -> Iterator[Ready | None]:
        """Send other blocks the initial weights that they need."""

    @abstractmethod
    def collect(self, layer: Layer, weight: Array, bias: Array) -> None:
        """Write this block's own part into a layer's weights and biases."""

    def run(self) -> Iterator[Ready | None]:
        plan, task = self.plan, self.task
        yield from self.begin()
        for step in range(task.steps):
            rows, at_once = task.rows(step, plan.settings.batch), plan.rows * self.partitions
            self.count, self.total = len(rows), 0.0
            for first in range(0, len(rows), at_once):
                self.part = rows[first + self.partition * plan.rows :][: plan.rows]
                self.first, self.last = first == 0, first + at_once >= len(rows)
                yield from self.run_phases(self.phases)
                self.backs += 1
            self.losses.append(self.total)
            self.trained = 1
            for _ in range(task.validation_passes if step % 2 else 0):
                self.part = np.arange(min(plan.rows, len(task.x)))
                self.count = len(self.part)
                yield from self.run_phases(self.forward_phases)
            self.trained = 0
            self.step += 1
        yield from self.end()

    def end(self) -> Iterator[None]:
        """Finish what is left after the last step."""
        yield None

    def run_phases(self, phases: Sequence[str]) -> Iterator[Ready | None]:
        for phase in phases:
            found = re.fullmatch(r"(.*?)(?: (\d+))?", phase)
            assert found is not None
            method = getattr(self, found[1].replace(" ", "_"))
            yield from method(self.plan.layers[int(found[2] or 0)])
            yield None
        self.clock.tick()
        self.wires.left[self.rank, self.passes] = self.clock.now
        self.passes += 1

    def rows_arrive(self, layer: Layer) -> Iterator[Ready | None]:
        if self.plan.multicasts_rows and self.passes:
            yield lambda: len(self.wires.fetched[self.passes]) == self.plan.blocks
        x = self.task.x[self.part]
        padded = np.pad(x, ((0, self.plan.rows - len(x)), (0, layer.k_tiles * K_TILE - x.shape[1])))
        self.inputs[self.passes % self.plan.input_buffers] = (self.passes, padded, self.task.y[self.part])
        yield None

    def fetch_the_next_rows(self, layer: Layer) -> Iterator[None]:
        """Fetch into the other buffer, or over the rows of this pass if there is one only. (A pass that does not train then
        fetches after its last phase.) Multicast rows overwrite rows that all other blocks must be known to have read."""
        if self.plan.multicasts_rows:
            self.wires.fetched[self.passes + 1].add(self.rank)
            for rank in range(self.plan.blocks if self.passes else 0):
                left = self.wires.left.get((rank, self.passes - 1))
                if left is None or self.clock.warps[0, rank] < left:
                    raise RaceError(
                        f"block {self.rank} fetches over rows of pass {self.passes - 1} that {rank} may read"
                    )
        self.inputs[(self.passes + 1) % self.plan.input_buffers] = (-1, np.empty(0), np.empty(0))
        yield None

    def fetched(self) -> tuple[Array, npt.NDArray[np.generic]]:
        """Rows and targets of this pass."""
        number, x, y = self.inputs[self.passes % self.plan.input_buffers]
        if number != self.passes:
            raise RaceError(f"block {self.rank} needs the rows of pass {self.passes}, which are being overwritten")
        return x, y


def chain(layer: Layer, z: Array) -> tuple[Array, Array]:
    """Values and slopes of a layer, from its sums."""
    slope = np.ones_like(z)
    for operation in layer.stage.chain:
        z, factor = ACTIVATIONS[operation.name](z)  # type: ignore[union-attr]
        slope *= factor
    return z, slope


def loss_of(plan: Plan, z: Array, target: Numbers, count: int) -> tuple[float, Array]:
    """The rows' part of the mean over `count` rows, and its gradient with respect to the outputs; 0 for padding."""
    width, rows = plan.layers[-1].stage.linear.outputs, len(target)
    real, delta = z[:rows, :width], np.zeros_like(z)
    if plan.settings.loss == "cross_entropy":
        exponents = np.exp(real - real.max(axis=1, keepdims=True)) if rows else real
        probabilities = exponents / exponents.sum(axis=1, keepdims=True)
        chosen = np.eye(width)[target.astype(np.int64)]
        delta[:rows, :width] = (probabilities - chosen) / count
        return float(-np.log((probabilities * chosen).sum(axis=1)).sum() / count), delta
    assert plan.settings.loss == "mse", plan.settings.loss
    off = real - target
    delta[:rows, :width] = 2 * off / (count * width)
    return float((off**2).sum() / (count * width)), delta
