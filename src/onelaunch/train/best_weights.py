"""What follows each epoch's validation: metrics that the engine does not compute, and early stopping with the best weights."""

from __future__ import annotations

from typing import Any

import torch

from onelaunch.engines.contract import Run, State
from onelaunch.run.early_stopping import BestEpoch
from onelaunch.train.metrics import compute_metrics
from onelaunch.train.predict import outputs_of

MIN_EVALUATION_ROWS = 256  # as in the engines: BatchNorm1d without running statistics depends on it


class EpochEnd:
    """Completes the record of an epoch from the model's weights, and decides whether the run goes on."""

    def __init__(self, run: Run) -> None:
        self.run = run
        rule = run.spec.early_stopping
        self.best = BestEpoch(rule) if rule else None
        self.weights: State = {}  # of the best epoch, on the CPU

    @property
    def needs_weights(self) -> bool:
        """Whether the model must hold the weights of each epoch's end."""
        return self.best is not None or bool(self.run.spec.all_metrics)

    @property
    def stopped(self) -> bool:
        return self.best is not None and self.best.stopped

    def complete(self, record: dict[str, Any]) -> None:
        """Add the metrics to the record of an epoch, whose weights the model holds, and note whether it is the best."""
        run, spec = self.run, self.run.spec
        if run.validation is None or record["validation"] is None:
            return
        if spec.all_metrics:
            x, y = run.validation
            outputs = outputs_of(run.model, (x, *run.more_validation_x), max(MIN_EVALUATION_ROWS, spec.batch_size))
            record["validation"] |= compute_metrics(spec, outputs, y)
        if self.best is None:
            return
        value = record["validation"][self.best.rule.metric]
        if self.best.improves(record["epoch"], value) and self.best.rule.restore_best:
            self.weights = {
                name: tensor.detach().to("cpu", copy=True)
                for name, tensor in run.model.state_dict().items()
                if isinstance(tensor, torch.Tensor)
            }

    def restore(self, about: dict[str, Any], weights: State) -> None:
        """Continue from a checkpoint: `about` as saved by `to_dict`, and the best epoch's weights."""
        if self.best is not None and about:
            self.best.restore(about)
            self.weights = weights

    def to_dict(self) -> dict[str, Any]:
        return self.best.to_dict() if self.best is not None else {}

    def finish(self) -> None:
        """Give the model the weights of its best epoch, if early stopping keeps them."""
        if self.weights:
            self.run.model.load_state_dict(self.weights, strict=False)
