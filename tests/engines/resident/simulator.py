"""Executes a Plan in NumPy, block by block and phase by phase, in any order that the plan's waits allow.

The phases are those the kernel is written from (`source.phase_names`), in float64; so are ownership, addresses, buffers and the
bytes a wait counts. What lies within a block (warps' partial sums, registers) is one matrix here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import STEP
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.source.source import phase_names
from tests.engines.resident.exchanges import Ready, Wires
from tests.engines.resident.fragments import Array, RaceError
from tests.engines.resident.rows_simulator import RowsBlock
from tests.engines.resident.running import Runner, Task
from tests.engines.resident.units_simulator import UnitsBlock

LOSS_PHASES = ("outputs", "loss", "wait for outputs", "meet")  # with the last of these a pass that does not train ends


class Simulation:
    """All blocks. `phases`: of a training pass, where a test wants others than the plan's."""

    def __init__(self, plan: Plan, task: Task, *, phases: Sequence[str] | None = None) -> None:
        self.plan, self.task = plan, task
        self.phases = list(phases or phase_names(plan))
        end = max(i for i, phase in enumerate(self.phases) if phase.startswith(LOSS_PHASES))
        wires, kind = Wires(plan), RowsBlock if isinstance(plan, RowsPlan) else UnitsBlock
        self.blocks: list[Runner] = [
            kind(wires, task, self.phases, self.phases[: end + 1], rank) for rank in range(plan.blocks)
        ]

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
        if not isinstance(self.plan, RowsPlan) and not self.plan.sums_outputs:
            assert all(block.losses == self.blocks[0].losses for block in self.blocks)
        return self.blocks[0].losses

    def weights(self) -> list[tuple[Array, Array]]:
        """Of each layer, collected from the owners; NaN where nobody owns."""
        found = []
        for layer in self.plan.layers:
            linear = layer.stage.linear
            weight = np.full((layer.units * self.plan.blocks, (layer.steps + 1) * STEP * self.plan.blocks), np.nan)
            bias = weight[:, 0].copy()
            for block in self.blocks:
                block.collect(layer, weight, bias)
            found.append((weight[: linear.outputs, : linear.inputs], bias[: linear.outputs]))
        return found
