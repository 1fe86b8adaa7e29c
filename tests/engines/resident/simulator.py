"""Executes a plan in NumPy, block by block and phase by phase, in any order that the plan's waits allow.

The phases, ownership, addresses, buffers and the bytes that a wait counts are those of the kernel; the numbers are float64.
What is inside a block (partial sums of warps, registers) is one matrix here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import K_TILE
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from tests.engines.resident.exchanges import Ready, Wires
from tests.engines.resident.fragments import Array, RaceError
from tests.engines.resident.rows_simulator import RowsBlock
from tests.engines.resident.running import Runner, Task
from tests.engines.resident.units_simulator import UnitsBlock

LOSS_PHASES = ("outputs", "loss", "wait for outputs", "meet")  # the last of these ends a pass that does not train


class Simulation:
    """All blocks of a plan. `phases`: of a training pass, instead of the plan's own."""

    def __init__(self, plan: Plan, task: Task, *, phases: Sequence[str] | None = None) -> None:
        self.plan, self.task = plan, task
        self.phases = list(phases or plan.phase_names())
        end = max(i for i, phase in enumerate(self.phases) if phase.startswith(LOSS_PHASES))
        wires, kind = Wires(plan), RowsBlock if isinstance(plan, RowsPlan) else UnitsBlock
        self.blocks: list[Runner] = [
            kind(wires, task, self.phases, self.phases[: end + 1], rank) for rank in range(plan.blocks)
        ]

    def run(self, choose: Callable[[list[int]], int]) -> list[float]:
        """Losses by step. `choose` picks the next block among the ranks of those that can continue."""
        running = {block.rank: block.run() for block in self.blocks}
        waits: dict[int, Ready] = {}
        while running:
            able = [rank for rank in running if rank not in waits or waits[rank]()]
            if not able:
                raise RaceError(f"no block can continue: blocks {sorted(waits)} wait for what never comes")
            rank = choose(able)
            waits.pop(rank, None)
            try:
                ready = next(running[rank])
            except StopIteration:
                del running[rank]
                continue
            if ready is not None:
                waits[rank] = ready
        if isinstance(self.plan, UnitsPlan) and not self.plan.sums_outputs:
            assert all(block.losses == self.blocks[0].losses for block in self.blocks)
        return self.blocks[0].losses

    def weights(self) -> list[tuple[Array, Array]]:
        """The weights and biases of each layer, collected from their owners; NaN where there is no owner."""
        found = []
        for layer in self.plan.layers:
            linear = layer.stage.linear
            weight = np.full((layer.units * self.plan.blocks, (layer.k_tiles + 1) * K_TILE * self.plan.blocks), np.nan)
            bias = weight[:, 0].copy()
            for block in self.blocks:
                block.collect(layer, weight, bias)
            found.append((weight[: linear.outputs, : linear.inputs], bias[: linear.outputs]))
        return found
