"""Networks so narrow that all their weights and gradients fit into one program: when they do, and where each parameter lies in
the padded vector that the kernels of `kernels/narrow_step.py` share. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from onelaunch.engines.graph.plan.stages import Stage

WIDEST, MOST_OUTPUTS, MOST_LINEARS = 128, 64, 4
MOST_WEIGHTS = 20_480  # padded: gradients are registers, 80 a thread of 8 warps
FEWEST_ROWS = 512  # below, a step has too few tiles to fill a chip


@dataclass(frozen=True)
class Narrow:
    units: tuple[int, ...]  # from inputs to outputs
    rows: int  # of a tile
    warps: int

    @property
    def widths(self) -> tuple[int, ...]:
        """The units, padded to powers of two that the tensor cores take."""
        return tuple(max(16, 1 << (units - 1).bit_length()) for units in self.units)

    @property
    def total(self) -> int:
        return sum(outputs * (inputs + 1) for inputs, outputs in pairwise(self.widths))

    def place(self, stage: int, part: str) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(offset, padded shape, shape) of a Linear's weight or bias."""
        pairs = list(pairwise(self.widths))
        offset = sum(outputs * (inputs + 1) for inputs, outputs in pairs[:stage])
        inputs, outputs = pairs[stage]
        if part == "weight":
            return offset, (outputs, inputs), (self.units[stage + 1], self.units[stage])
        return offset + outputs * inputs, (outputs,), (self.units[stage + 1],)


def narrow_of(stages: list[Stage], batch: int, kind: str) -> Narrow | None:
    """How to run these stages as one narrow step, or None where that does not fit."""
    units = (stages[0].linear.inputs, *(stage.linear.outputs for stage in stages))
    endings = {(stage.activation, stage.p) for stage in stages[:-1]}
    if not 2 <= len(stages) <= MOST_LINEARS or batch < FEWEST_ROWS:
        return None
    if len(endings) > 1 or any(p for _, p in endings) or len({stage.linear.bias for stage in stages}) > 1:
        return None
    if max(units) > WIDEST or units[-1] > MOST_OUTPUTS:
        return None
    weights = sum(inputs * outputs for inputs, outputs in pairwise(Narrow(units, 0, 0).widths))
    if weights > MOST_WEIGHTS:
        return None
    rows = 32 if kind == "fp32" else 64
    return Narrow(units, rows, 4 if weights <= MOST_WEIGHTS // 2 else 8)
