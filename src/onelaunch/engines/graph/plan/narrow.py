"""Narrow networks, whose weights and gradients all fit into one program: which networks are narrow, and where each parameter is
in the padded vector that the kernels of `kernels/narrow_step.py` share. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from onelaunch.engines.graph.plan.stages import Stage
from onelaunch.integers import next_power_of_2

MAX_WIDTH, MAX_OUTPUTS, MAX_LINEARS = 128, 64, 4
MAX_WEIGHTS = 20_480  # padded: gradients are kept in registers, 80 per thread of 8 warps
MIN_BATCH = 512  # a smaller batch has too few tiles to fill a chip


@dataclass(frozen=True)
class Narrow:
    units: tuple[int, ...]  # from inputs to outputs
    rows: int  # per tile
    warps: int

    @property
    def widths(self) -> tuple[int, ...]:
        """The units padded to powers of two that tensor cores take."""
        return tuple(max(16, next_power_of_2(units)) for units in self.units)

    @property
    def total(self) -> int:
        """Elements of the padded vector."""
        return sum(outputs * (inputs + 1) for inputs, outputs in pairwise(self.widths))

    def position(self, stage: int, part: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(offset, padded shape, shape) of a Linear's "weight" or "bias"."""
        pairs = list(pairwise(self.widths))
        offset = sum(outputs * (inputs + 1) for inputs, outputs in pairs[:stage])
        inputs, outputs = pairs[stage]
        if part == "weight":
            return offset, (outputs, inputs), (self.units[stage + 1], self.units[stage])
        return offset + outputs * inputs, (outputs,), (self.units[stage + 1],)


def plan_narrow(stages: list[Stage], batch: int, dtype: str) -> Narrow | None:
    """How to run these stages as one narrow step, or None where they do not fit."""
    units = (stages[0].linear.inputs, *(stage.linear.outputs for stage in stages))
    epilogues = {(stage.activation, stage.p) for stage in stages[:-1]}
    if not 2 <= len(stages) <= MAX_LINEARS or batch < MIN_BATCH:
        return None
    if any(stage.segment for stage in stages):
        return None
    if len(epilogues) > 1 or any(p for _, p in epilogues) or len({stage.linear.bias for stage in stages}) > 1:
        return None
    if max(units) > MAX_WIDTH or units[-1] > MAX_OUTPUTS:
        return None
    weights = sum(inputs * outputs for inputs, outputs in pairwise(Narrow(units, 0, 0).widths))
    if weights > MAX_WEIGHTS:
        return None
    return Narrow(units, 32 if dtype == "fp32" else 64, 4 if weights <= MAX_WEIGHTS // 2 else 8)
