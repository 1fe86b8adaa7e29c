"""The record of a run: the loss of every step, the metrics of every epoch, the engine and the reason for it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onelaunch.engines.contract import Metrics, Segment
from onelaunch.errors import OnelaunchError, require_path
from onelaunch.run.objective import has_accuracy, predictions_per_row
from onelaunch.run.spec import Spec


@dataclass
class History:
    """What `fit` returns. `epochs` has one dict per epoch, with the keys

    epoch       its number, from 0 as in `ol.permutation`
    step        number of steps done at its end
    loss        mean over the epoch's rows (with their weights, if they have any)
    accuracy    of the training batches at the time they were trained on; None for mse
    validation  a dict with loss, accuracy and the run's metrics, or None
    lr          learning rate of its last step
    seconds     time it took
    """

    losses: list[float] = field(default_factory=list)  # the loss of every step, before its update
    epochs: list[dict[str, Any]] = field(default_factory=list)  # one dict per epoch, as above
    engine: str = ""  # the engine that ran: resident, graph, cpu, compiled or eager
    reason: str = ""  # why this engine, and why not a faster one
    precision: str = ""  # of the matrix products, such as fp32
    device: str = ""  # the name of the device
    plan: str = ""  # for people: how the engine lays out the run, where it says so
    allocations: dict[str, int] = field(default_factory=dict)  # allocator calls, of an engine that counts them
    seconds: float = 0.0  # training and validation, without start-up
    startup_seconds: float = 0.0  # from the call of fit to the first step
    best_epoch: int | None = None  # with early stopping: the epoch (from 0) with the best metric

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON: a number that is not finite becomes None."""
        return json_ready(dataclasses.asdict(self))

    def to_pandas(self) -> Any:
        """A pandas DataFrame with one row per epoch: epoch, step, loss, accuracy, lr, seconds, and one column
        `validation_<name>` per validation metric. Raises OnelaunchError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise OnelaunchError("to_pandas needs pandas: pip install pandas") from error
        return pandas.DataFrame(flat_epochs(self.epochs))

    def plot(self, path: str | Path) -> Path:
        """Draw loss and accuracy into an image file and return its path; its suffix (.png, .svg, .pdf) selects the format."""
        from onelaunch.train.curves import draw

        title = f"{len(self.losses):,} steps on {self.engine}, {self.seconds:.3g} s"
        return draw(self.losses, self.epochs, title, require_path("path", path), best=self.best_epoch)

    @property
    def kept(self) -> dict[str, Any]:
        """The record of the epoch whose weights the model has: the best with early stopping, else the last."""
        return self.epochs[kept_epoch(len(self.epochs), self.best_epoch)]

    def __repr__(self) -> str:
        result = f", last epoch {summary(self.epochs[-1])}" if self.epochs else ""
        if self.best_epoch is not None and self.best_epoch < len(self.epochs):
            result = f", best epoch {self.best_epoch + 1} of {len(self.epochs)} {summary(self.kept)}"
        return f"<History: {len(self.losses)} steps on {self.engine} in {self.seconds:.3g} s{result}>"


def kept_epoch(epochs: int, best: int | None) -> int:
    """The number of the epoch, of so many, whose weights the model has: the best where it was restored, else the last."""
    return epochs - 1 if best is None or best >= epochs else best


def flat_epochs(epochs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records of epochs with `validation` as columns `validation_<name>`; accuracy is left out where it is None."""
    rows = []
    for epoch in epochs:
        row = {name: value for name, value in epoch.items() if name != "validation"}
        row |= {f"validation_{name}": value for name, value in (epoch["validation"] or {}).items()}
        rows.append({name: value for name, value in row.items() if value is not None})
    return rows


def json_ready(value: Any) -> Any:
    """`value` with None in place of every float that JSON cannot express: NaN and the infinities."""
    if isinstance(value, dict):
        return {key: json_ready(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [json_ready(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(epoch: dict[str, Any], *, short: bool = False) -> str:
    """An epoch's record as text: `loss 0.0312, accuracy 99.12 %, validation loss 0.0627, accuracy 98.11 %, f1 0.9811`.

    short: name what training and validation share once: `loss 0.0312, accuracy 99.12 %, validation 0.0627, 98.11 %, f1 0.9811`.
    """
    parts = _scores(epoch, ("loss", "accuracy"))
    if epoch["validation"]:
        found = _scores(epoch["validation"], tuple(epoch["validation"]), unnamed=("loss", "accuracy") if short else ())
        parts.append("validation " + ", ".join(found))
    return ", ".join(parts)


def _scores(values: dict[str, Any], names: tuple[str, ...], unnamed: tuple[str, ...] = ()) -> list[str]:
    texts = []
    for name in names:
        if values[name] is not None:
            text = f"{values[name]:.2%}".replace("%", " %") if name == "accuracy" else f"{values[name]:.4g}"
            texts.append(text if name in unnamed else f"{name} {text}")
    return texts


class Recorder:
    """Adds segments to a History. An epoch that a stop has cut is completed when the run resumes."""

    def __init__(self, spec: Spec, outputs: int, history: History) -> None:
        self.spec, self.outputs, self.history = spec, outputs, history
        self.correct = 0
        self.epoch_seconds = 0.0
        self.weighted_loss = self.weight = 0.0  # of the epoch so far, where rows are weighted

    def add(self, segment: Segment, seconds: float) -> dict[str, Any] | None:
        """Add a segment that took `seconds`; returns the epoch's record if the segment ends an epoch or the run."""
        self.history.losses += segment.losses.tolist()
        self.history.seconds += seconds
        self.correct += segment.correct or 0
        self.epoch_seconds += seconds
        if segment.weights is not None:
            self.weighted_loss += float((segment.losses.double() * segment.weights).sum())
            self.weight += float(segment.weights.sum())
        done = len(self.history.losses)
        if done != self.spec.epoch_end(segment.first_step):
            return None
        record = self._record(done, segment.validation)
        self.history.epochs.append(record)
        if done % self.spec.steps_per_epoch == 0:  # otherwise the run ends within an epoch and may be extended
            self.correct, self.epoch_seconds = 0, 0.0
            self.weighted_loss = self.weight = 0.0
        return record

    def _record(self, done: int, validation: Metrics | None) -> dict[str, Any]:
        spec, epoch = self.spec, self.spec.epoch_of(done - 1)
        losses = self.history.losses[epoch * spec.steps_per_epoch : done]
        full, last = min(spec.batch_size, spec.rows), spec.rows_of(done - 1)  # only the last batch may be smaller
        rows = full * (len(losses) - 1) + last
        weighted = [value * full for value in losses]
        weighted[-1] = losses[-1] * last
        loss = math.fsum(weighted) / rows
        if self.weight:
            loss = self.weighted_loss / self.weight
        predictions = rows * predictions_per_row(spec, self.outputs)
        return {
            "epoch": epoch,
            "step": done,
            "loss": loss,
            "accuracy": self.correct / predictions if has_accuracy(spec) else None,
            "validation": {"loss": validation.loss, "accuracy": validation.accuracy} if validation else None,
            "lr": spec.lr_at(done - 1),
            "seconds": self.epoch_seconds,
        }

    def partial(self) -> dict[str, Any]:
        """The counts of an unfinished epoch, which a checkpoint must keep."""
        return {
            "correct": self.correct, "epoch_seconds": self.epoch_seconds, "weighted_loss": self.weighted_loss,
            "weight": self.weight,
        }  # fmt: skip

    def restore(self, partial: dict[str, Any]) -> None:
        """Continue from the `partial()` of a checkpoint, whose losses and epochs are in the history already."""
        self.correct, self.epoch_seconds = int(partial["correct"]), float(partial["epoch_seconds"])
        self.weighted_loss, self.weight = partial.get("weighted_loss", 0.0), partial.get("weight", 0.0)
        done = len(self.history.losses)
        recorded = bool(self.history.epochs) and self.history.epochs[-1]["step"] == done
        if recorded and done % self.spec.steps_per_epoch and done < self.spec.total_steps:
            self.history.epochs.pop()  # the record of a run that ended within this epoch, which now continues
