"""A member of a sweep: one candidate with one seed on one split of the rows, and the record of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onelaunch.run.spec import Spec
from onelaunch.train.history import History, kept_epoch

Array = np.ndarray[Any, Any]
EPOCH_COLUMNS = ("epoch", "step", "loss", "accuracy", "lr", "seconds")
WHOLE_NUMBERS = ("epoch", "step")
SHARED = ("engine", "reason", "precision", "device", "plan")  # fields of a History that many members have in common


@dataclass(frozen=True, slots=True)
class Member:
    index: int  # in the sweep
    candidate: int
    parameters: dict[str, Any]  # of the candidate: options of fit and parameters of make_model
    seed: int
    split: int  # which fold or subset of the rows; 0 if there is one

    def __str__(self) -> str:
        """`lr=0.01, seed=3`"""
        return ", ".join(f"{name}={value}" for name, value in {**self.parameters, "seed": self.seed}.items())


def steps_of_part(part: float, total: int, per_epoch: int) -> int:
    """The steps of a part of a run, rounded to whole epochs; at least one epoch."""
    epochs = max(1, round(part * total / per_epoch))
    return total if part >= 1 else min(epochs * per_epoch, total)


@dataclass(frozen=True, slots=True)
class Record:
    """What a member came to, small enough to keep for every member of a large sweep."""

    index: int
    losses: Array  # float32, one per step
    epochs: Array  # float64 [epochs, columns]: EPOCH_COLUMNS, then the validation metrics; an accuracy of NaN is None
    metrics: tuple[str, ...]  # names of the validation metrics
    shared: dict[str, Any]  # the fields SHARED, one dict for all members of a group
    seconds: float
    best_epoch: int | None
    error: str = ""  # why the member has no result: its loss diverged, …
    finished: bool = True  # False: trained as far as a rung of successive halving
    total: int = 0  # steps of the whole run; 0 if it could not begin
    per_epoch: int = 1  # steps per epoch

    @classmethod
    def of(
        cls,
        index: int,
        history: History,
        shared: dict[str, Any],
        spec: Spec | None,
        *,
        error: str = "",
        finished: bool = True,
    ) -> Record:
        """`spec`: None if the member could not be made."""
        metrics = tuple(dict.fromkeys(name for epoch in history.epochs for name in epoch["validation"] or {}))
        table = np.full((len(history.epochs), len(EPOCH_COLUMNS) + len(metrics)), np.nan)
        for row, epoch in zip(table, history.epochs, strict=True):
            validation = epoch["validation"] or {}
            values = [epoch[name] for name in EPOCH_COLUMNS] + [validation.get(name) for name in metrics]
            row[:] = [np.nan if value is None else value for value in values]
        losses = np.array(history.losses, np.float32)
        return cls(
            index, losses, table, metrics, shared, history.seconds, history.best_epoch, error, finished,
            spec.total_steps if spec else 0, spec.steps_per_epoch if spec else 1,
        )  # fmt: skip

    def history(self) -> History:
        """The History that `fit` would have returned."""
        return History(
            losses=self.losses.tolist(), epochs=[self._epoch(row) for row in self.epochs], seconds=self.seconds,
            best_epoch=self.best_epoch, **self.shared,
        )  # fmt: skip

    def _epoch(self, row: Array) -> dict[str, Any]:
        values = row.tolist()
        found: dict[str, Any] = dict(zip(EPOCH_COLUMNS, values, strict=False))
        for name in WHOLE_NUMBERS:
            found[name] = int(found[name])
        validation: dict[str, Any] = dict(zip(self.metrics, values[len(EPOCH_COLUMNS) :], strict=True))
        for each in (found, validation):  # an accuracy is a fraction, or None; a loss may be NaN
            if "accuracy" in each and np.isnan(each["accuracy"]):
                each["accuracy"] = None
        lr, seconds = found.pop("lr"), found.pop("seconds")
        return {**found, "validation": validation if self.metrics else None, "lr": lr, "seconds": seconds}

    def value(self, metric: str) -> float:
        """A validation metric after the last epoch, or after the best one if early stopping has restored it.

        Without validation it is the training loss. NaN if the member failed.
        """
        if self.error or not len(self.epochs):
            return float("nan")
        if metric in self.metrics:
            kept = kept_epoch(len(self.epochs), self.best_epoch)
            return float(self.epochs[kept, len(EPOCH_COLUMNS) + self.metrics.index(metric)])
        return float(self.epochs[-1, EPOCH_COLUMNS.index(metric)]) if metric in EPOCH_COLUMNS else float("nan")

    def reaches(self, part: float) -> bool:
        """Whether the member has trained this part of its run, or cannot train any further."""
        return self.finished or self.steps >= steps_of_part(part, self.total, self.per_epoch)

    def value_at(self, metric: str, part: float) -> float:
        """The metric after this part of the run, or after the last epoch if there are fewer; NaN if the member failed."""
        if self.error or not len(self.epochs):
            return float("nan")
        epochs = -(-steps_of_part(part, self.total, self.per_epoch) // self.per_epoch)
        return float(self.curve(metric)[min(epochs, len(self.epochs)) - 1])

    def curve(self, metric: str) -> Array:
        """The metric after every epoch, float64 [epochs]."""
        column = (
            len(EPOCH_COLUMNS) + self.metrics.index(metric) if metric in self.metrics else EPOCH_COLUMNS.index(metric)
        )
        return self.epochs[:, column]

    @property
    def steps(self) -> int:
        return len(self.losses)
