"""What the launchers of a training run's kernels take. No Triton here: plans are made without it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from onelaunch.activations import saves_input
from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.optimizers import CONSTANTS
from onelaunch.rng import keep_scale, keep_threshold, signed_seed

# Columns of the device table: of its line 0 (per run) and of the other lines (per step). See run_state.py.
HYPER = (*CONSTANTS, "label_smoothing", "clip_norm")
SCALARS = ("row_weight", "rate", "inverse_root", "decay", "rows")
TABLE_WIDTH = 8
# Elements of `control`: the next step's index in its epoch and in the run, and the correct predictions of the epoch.
CONTROL = ("epoch_step", "run_step", "correct")
CONTROL_SIZE = 4
MAX_SQUARE_PROGRAMS = 1024  # of the sum of squared gradients (clip.py): the last one adds up the sums of all
SQUARES_PER_PROGRAM = 1024  # at once
MAX_SEGMENT_PROGRAMS = 64  # of the backward pass of a segment (row_segment.py): the last one adds up the sums of all


class Clock(NamedTuple):
    """Where the run is: `control` and `table` of run_state.py, and the step's index within the captured graph."""

    control: torch.Tensor
    table: torch.Tensor
    step: int
    overlap: bool = False  # whether a kernel may start while the previous one ends


class Rows(NamedTuple):
    """A stage's input: `[batch, k]`, or the whole data set with the order in which its rows are visited."""

    values: torch.Tensor
    order: torch.Tensor | None = None


class Targets(NamedTuple):
    """What the loss reads of the data's rows: their targets, and their weights where they have any."""

    values: torch.Tensor
    weights: torch.Tensor | None = None


class Epilogue(NamedTuple):
    """What follows a Linear: an activation, then dropout with the run's masks."""

    activation: str | None = None
    p: float = 0.0
    layer: int = 0  # index of the dropout among the model's dropouts
    seed: int = 0

    @property
    def saves_input(self) -> bool:
        """Whether the activation's derivative needs z, the value before the activation."""
        return saves_input(self.activation)

    @property
    def dropout_values(self) -> tuple[int, int, int, float]:
        """seed, threshold, layer, scale, as the kernels take them."""
        return signed_seed(self.seed), keep_threshold(self.p), self.layer, keep_scale(self.p)


def segment_width(n: int) -> int:
    """The units of a row as the kernels of a segment hold them."""
    return max(16, next_power_of_2(n))


def backward_rows(n: int) -> int:
    """The rows that a program of a segment's backward pass takes at once."""
    return max(1, 1024 // segment_width(n))


def backward_programs(batch: int, n: int) -> int:
    return min(ceil_div(batch, backward_rows(n)), MAX_SEGMENT_PROGRAMS)


def square_programs(gradients: int) -> int:
    return min(ceil_div(gradients, SQUARES_PER_PROGRAM), MAX_SQUARE_PROGRAMS)


class Weights(NamedTuple):
    """A Linear's fp32 weights, the optimizer's states and, for large batches, a copy in the dtype of the products.

    `first` and `second` are the states in the order of `Optimizer.state_names`; None where the optimizer has fewer. With
    `low`, the weights are split (split_weights.py), and `weight` is the high word, in bf16.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    weight_first: torch.Tensor | None = None
    weight_second: torch.Tensor | None = None
    bias_first: torch.Tensor | None = None
    bias_second: torch.Tensor | None = None
    copy: torch.Tensor | None = None
    low: torch.Tensor | None = None

    @property
    def states_and_bias(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments of a kernel after the weights: their states, the bias and its states."""
        return self.weight_first, self.weight_second, self.bias, self.bias_first, self.bias_second
