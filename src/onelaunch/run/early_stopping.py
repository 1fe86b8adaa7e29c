"""When a run ends before its last epoch: after `patience` epochs in which a validation metric has not improved."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from onelaunch.errors import ArgumentTypeError, OnelaunchError, require_integer
from onelaunch.run.metric_names import VALIDATION_METRICS, is_loss, require_metric


@dataclass(frozen=True)
class EarlyStopping:
    """Stop after `patience` epochs without an improvement of a validation metric by more than `min_delta`.

    patience: the number of epochs to wait for an improvement, 1 or more.
    metric: "loss", "accuracy", or one of the metrics that `fit` can compute; validation data is needed.
    min_delta: the smallest change of the metric that counts as an improvement.
    restore_best: the model gets the weights of its best epoch at the end, also if the run was not stopped early.
    """

    patience: int = 5
    metric: str = "loss"
    min_delta: float = 0.0
    restore_best: bool = True

    def __post_init__(self) -> None:
        patience = require_integer("early_stopping.patience", self.patience, "a number of epochs, 1 or more")
        if patience < 1:
            raise OnelaunchError(f"early_stopping.patience={patience} must be 1 or more epochs")
        object.__setattr__(self, "patience", patience)
        require_metric("early_stopping.metric", self.metric, VALIDATION_METRICS)
        delta = self.min_delta
        if isinstance(delta, bool) or not isinstance(delta, int | float):
            raise ArgumentTypeError(f"early_stopping.min_delta={delta!r:.60} is not a number")
        if not 0 <= delta < math.inf:
            raise OnelaunchError(f"early_stopping.min_delta={delta} must be a finite number, 0 or more")
        object.__setattr__(self, "min_delta", float(delta))
        if not isinstance(self.restore_best, bool):
            raise ArgumentTypeError(f"early_stopping.restore_best={self.restore_best!r:.60} must be True or False")


def make_early_stopping(value: Any) -> EarlyStopping | None:
    """The argument `early_stopping`: None, a patience in epochs, an EarlyStopping, or a dict of its fields."""
    if value is None or isinstance(value, EarlyStopping):
        return value
    if isinstance(value, dict):
        known = {field.name for field in dataclasses.fields(EarlyStopping)}
        if unknown := sorted(map(str, value.keys() - known)):
            raise OnelaunchError(f"early_stopping has no {unknown[0]!r}: it has {', '.join(sorted(known))}")
        return EarlyStopping(**value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(
            f"early_stopping={value!r:.60} is not a number of epochs: pass 5, or ol.EarlyStopping(patience=5)"
        )
    return EarlyStopping(patience=value)


class BestEpoch:
    """Follows a metric over the epochs of a run. It is pure data, so that a checkpoint can keep it."""

    def __init__(self, rule: EarlyStopping) -> None:
        self.rule = rule
        self.value = math.nan  # of the best epoch so far
        self.epoch = -1
        self.waited = 0  # epochs since the last improvement

    @property
    def stopped(self) -> bool:
        """Whether the metric has not improved for `patience` epochs."""
        return self.waited >= self.rule.patience

    def improves(self, epoch: int, value: float) -> bool:
        """Note an epoch's metric; returns whether it is the best so far. NaN never is, except in the first epoch."""
        gain = self.value - value if is_loss(self.rule.metric) else value - self.value
        better = self.epoch < 0 or gain > self.rule.min_delta or (math.isnan(self.value) and not math.isnan(value))
        if better:
            self.value, self.epoch, self.waited = value, epoch, 0
        else:
            self.waited += 1
        return better

    def to_dict(self) -> dict[str, Any]:
        return {"value": None if math.isnan(self.value) else self.value, "epoch": self.epoch, "waited": self.waited}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from the `to_dict()` of a checkpoint."""
        value = saved["value"]
        self.value = math.nan if value is None else float(value)
        self.epoch, self.waited = int(saved["epoch"]), int(saved["waited"])
