"""What an engine is: it takes a Run, and yields the run's Segments while it trains the model in place.

The driver (`train/loop.py`) does everything that is the same for all of them: history, checkpoints, progress, Ctrl-C, the
stop on a loss that is not finite. An engine may hold the weights wherever it likes while a segment runs.

Optimizer state has one form for all engines, so that checkpoints do not depend on them: one tensor a parameter, shaped like
it, named `momentum.<parameter>` (SGD) or `exp_avg.<parameter>` and `exp_avg_sq.<parameter>` (Adam, AdamW), with the
parameter's name in `model.state_dict()`. Adam's step count is the run's. What only one engine needs goes under
`engine.<name>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from onelaunch.run.network import Network
from onelaunch.run.objective import has_accuracy, predictions_per_row, values_per_row
from onelaunch.run.spec import Spec

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Metrics:
    """Mean loss over rows; accuracy as a fraction, or None where it has no meaning (mse)."""

    loss: float
    accuracy: float | None

    @classmethod
    def of(cls, spec: Spec, loss_sum: float, correct: int, rows: int, outputs: int) -> Metrics:
        """From the loss summed over `rows` rows of `outputs` values each, and the number of correct predictions."""
        loss = loss_sum / (rows * values_per_row(spec, outputs))
        accuracy = correct / (rows * predictions_per_row(spec, outputs)) if has_accuracy(spec) else None
        return cls(loss, accuracy)


@dataclass(frozen=True)
class Run:
    """A checked request. `x` and `y` lie on the model's device: x uint8 (meaning value / 255), floating point or, for
    models that are not plain, any integers; y int64 classes `[rows]` for cross_entropy, else floats shaped like the output.
    """

    spec: Spec
    model: nn.Module
    network: Network | None  # None: not a plain MLP, `not_plain` says why
    not_plain: str
    x: torch.Tensor
    y: torch.Tensor
    validation: tuple[torch.Tensor, torch.Tensor] | None
    outputs: int  # values a row of the model's output has
    checkpoints: bool = (
        False  # whether a snapshot is taken after each segment; an engine may run on between them if not
    )

    @property
    def device(self) -> torch.device:
        return self.x.device


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one epoch. It ends where the epoch or the run ends, or early when a stop was asked for."""

    first_step: int
    losses: torch.Tensor  # float32 on the CPU, one a step: the mean over the batch before the step's update
    correct: int | None  # right predictions among the segment's training rows (elements, for bce_with_logits)
    validation: Metrics | None  # after the last step of an epoch or of the run, when the Run has validation data


class Monitor(Protocol):
    """How a running engine and its driver talk. Both calls are cheap; engines make them at least ten times a second."""

    @property
    def stop(self) -> bool:
        """Whether to end the segment at the next step boundary."""

    def report(self, step: int, loss: float, correct: int | None) -> None:
        """`step` steps of the run are done; the loss of the last, and the right predictions so far in this segment."""


class Session(Protocol):
    plan: str  # for people: what lives where and which phase does what
    allocations: dict[str, int]  # calls to an allocator and the like, where the engine counts them
    precision: str  # what "auto" became

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        """Train from `first_step` to the end of the run. Between two segments `snapshot` may be called."""

    def snapshot(self) -> State:
        """Write parameters and buffers back into the model and return the optimizer's state, as of the last segment."""

    def close(self) -> None:
        """Leave the model trained and usable, whatever happened. May be called at any time, more than once."""


class Engine(Protocol):
    name: str

    def unavailable_reason(self, device: torch.device) -> str:
        """Why the engine cannot run on this machine and device; empty when it can."""

    def unsupported_reason(self, run: Run) -> str:
        """Why it cannot run this run (it can run here); empty when it can."""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> Session:
        """Make ready. `state` is a snapshot's (empty for a new run); the model already holds the weights."""
