"""What the launchers of a training run's kernels take. No Triton here: plans are made without it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.activations import saves_input
from onelaunch.optimizers import CONSTANTS
from onelaunch.rng import keep_scale, keep_threshold

# The columns of the table in run_state: its line 0, and the line of a step.
HYPER = (*CONSTANTS, "smoothing")
SCALARS = ("row_weight", "rate", "inverse_root", "decay", "rows")
WIDTH = 8


class Clock(NamedTuple):
    """Where a run is."""

    control: torch.Tensor
    table: torch.Tensor
    step: int  # within the graph
    overlap: bool = False  # whether a kernel may start while the one before it ends


class Rows(NamedTuple):
    """A stage's input: `[batch, k]`, or the whole data set with the order in which it is visited."""

    values: torch.Tensor
    order: torch.Tensor | None = None


class Ending(NamedTuple):
    """What follows a Linear: an activation, then dropout with the run's masks."""

    activation: str | None = None
    p: float = 0.0
    layer: int = 0  # of the dropout, among the model's
    seed: int = 0

    @property
    def from_z(self) -> bool:
        """Whether the activation's slope needs the value before it."""
        return saves_input(self.activation)

    @property
    def dropout_values(self) -> tuple[int, int, int, float]:
        """seed, threshold, layer, scale, as the kernels take them."""
        seed = self.seed - 2**64 if self.seed >= 2**63 else self.seed
        return seed, keep_threshold(self.p), self.layer, keep_scale(self.p)


class Weights(NamedTuple):
    """A Linear's fp32 weights, what the optimizer keeps for them, and a copy in the type of the products (large batches).

    With `low` the weights come in halves (kernels/halves.py), and `weight` is the high one, in bf16."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    weight_first: torch.Tensor | None = None
    weight_second: torch.Tensor | None = None
    bias_first: torch.Tensor | None = None
    bias_second: torch.Tensor | None = None
    copy: torch.Tensor | None = None
    low: torch.Tensor | None = None


class Tile(NamedTuple):
    """A program's share of a GEMM, its warps and the depth of its pipeline."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3
    tma: bool = False
    splits: int = 1  # programs that share one output tile, each with a part of the inner dimension
