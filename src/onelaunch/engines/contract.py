"""The interface of an engine: it takes a Run and yields the run's Segments while it trains the model in place.

The driver (`train/loop.py`) does what all engines have in common: history, checkpoints, progress, Ctrl-C, and the stop on a
loss that is not finite. While a segment runs, an engine may keep the weights wherever it likes.

Optimizer state has one form for all engines, so that a checkpoint does not depend on its engine. Each state is one tensor per
parameter, of the parameter's shape, called `<state>.<parameter>`: the state's name in `onelaunch.optimizers`, such as
`momentum` or `exp_avg`, and the parameter's name in `model.state_dict()`. The optimizer's step count is the run's, unless
`engine.step.<parameter>` says otherwise. State that only one engine needs is called `engine.<name>`.

Callbacks may change the model between two segments. An engine that runs the model itself follows that; for any other the
driver closes the session and starts a new one from the changed model (`train/run_session.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

from onelaunch.run.network import Network
from onelaunch.run.objective import has_accuracy, predictions_per_row, values_per_row
from onelaunch.run.spec import Spec

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Metrics:
    """The mean loss over rows, and the accuracy as a fraction (None for mse, which has none)."""

    loss: float
    accuracy: float | None

    @classmethod
    def of(cls, spec: Spec, loss_sum: float, correct: int, rows: int, outputs: int) -> Metrics:
        """The means over `rows` rows of `outputs` values each, from the summed loss and the number of correct predictions."""
        loss = loss_sum / (rows * values_per_row(spec, outputs))
        accuracy = correct / (rows * predictions_per_row(spec, outputs)) if has_accuracy(spec) else None
        return cls(loss, accuracy)


@dataclass(frozen=True)
class Run:
    """A checked training request. `x` and `y` are on the model's device; an x that is too large for it stays on the host.

    `train_rows`: where x is too large to copy, the numbers of its `spec.rows` training rows (the others are held out); row i of
    the run is then row `train_rows[i]` of x, y and weights. None: all rows of x are training rows.

    x: uint8 (meaning value / 255) or floating point; any integers for a model that is not an MLP.
    y: int64 classes `[rows]` for cross_entropy, else floats of the output's shape.
    weights: float32 `[rows]`, the weight of each training row in its batch's mean loss; None where all count the same.
    """

    spec: Spec
    model: nn.Module
    network: Network | None  # None: the model is not an MLP, for `no_network_reason`
    no_network_reason: str
    x: torch.Tensor
    y: torch.Tensor
    validation: tuple[torch.Tensor, torch.Tensor] | None
    outputs: int  # values per row of the model's output
    weights: torch.Tensor | None = None
    train_rows: torch.Tensor | None = None  # int64 `[spec.rows]`
    more_x: tuple[torch.Tensor, ...] = ()  # further inputs of the model, for a model with several
    more_validation_x: tuple[torch.Tensor, ...] = ()
    loss_function: Callable[[Any, torch.Tensor], torch.Tensor] | None = None  # of the user, for Spec.loss "custom"
    loader: DataLoader[Any] | None = None  # where batches come from; x and y are then its first batch
    classes: tuple[str, ...] | None = None  # their names by number, if the user passed names
    threads: int | None = None  # that results may depend on, where others execute the run; None: PyTorch's number
    checkpoints: bool = False  # a snapshot follows each segment; without one an engine may run ahead between segments
    # Why an engine that counts one number of updates for all parameters cannot go on, such as after a layer was unfrozen.
    uneven_updates: str = ""

    @property
    def device(self) -> torch.device:
        return self.y.device


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of one epoch, up to the end of the epoch or of the run, or to where a stop was requested."""

    first_step: int
    losses: torch.Tensor  # float32 on the CPU, one per step: the batch's mean loss before the step's update
    correct: int | None  # correct predictions among the segment's training rows (elements, for bce_with_logits)
    validation: Metrics | None  # after the last step of an epoch or of the run, if the Run has validation data
    weights: torch.Tensor | None = (
        None  # float64 on the CPU, one per step: its rows' summed weights, if the Run has any
    )


class Monitor(Protocol):
    """How a running engine reports to its driver. Both members are cheap; engines use them at least ten times per second."""

    @property
    def stop(self) -> bool:
        """Whether the engine should end the segment at the next step boundary."""

    def report(self, step: int, loss: float, correct: int | None) -> None:
        """Say that `step` steps of the run are done, with the last one's loss and the segment's correct predictions so far."""


class Session(Protocol):
    """An engine at work on one Run."""

    plan: str  # for people: where the data is kept and what each phase does
    allocations: dict[str, int]  # number of allocator calls by name, for an engine that counts them
    precision: str  # what precision="auto" resolved to
    # Whether the next segment trains on from values, settings, hooks and frozen parameters that somebody has changed in the
    # model. False: the session has its own copy of them, and writes its weights over the model's. New layers, and parameters
    # to train that were frozen or not there at the start, need a new session in either case.
    follows_model: bool

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        """Train from `first_step` to the end of the run. The driver may call `snapshot` between two segments."""

    def snapshot(self) -> State:
        """Write parameters and buffers back into the model and return the optimizer's state, as of the last segment."""

    def close(self) -> None:
        """Leave the model trained and usable, after an error too. May be called at any time and repeatedly."""


class Engine(Protocol):
    name: str

    def unavailable_reason(self, device: torch.device) -> str:
        """Why the engine cannot run on this machine and device; empty when it can."""

    def unsupported_reason(self, run: Run) -> str:
        """Why an engine that is available cannot run `run`; empty when it can."""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> Session:
        """Prepare to train. `state` is that of a snapshot, empty for a new run; the model already has the weights."""
