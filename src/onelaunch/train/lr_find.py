"""`ol.lr_find`: a learning-rate range test. The rate rises with every step; the loss shows where learning starts and breaks."""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.colours import LIGHT
from onelaunch.engines import choose, engine_or_reason
from onelaunch.engines.contract import Engine, Run
from onelaunch.errors import ArgumentTypeError, OnelaunchError, require_integer, require_path, suggest
from onelaunch.run.options import Options
from onelaunch.run.spec import Spec
from onelaunch.train.figure_style import add_axes, add_legend, new_figure, save_figure
from onelaunch.train.inputs import make_run

SMOOTHING = 0.9  # of the running mean over the losses
BREAKS = 4.0  # times the best smoothed loss: from there on the run has diverged
SKIPPED = 5  # first points, where the running mean still settles


@dataclass(frozen=True, kw_only=True)
class RangeSpec(Spec):
    """A run whose learning rate rises by the same factor with every step, from `min_lr` to `lr`."""

    min_lr: float = 0.0

    def lr_at(self, step: int) -> float:
        return self.min_lr * (self.lr / self.min_lr) ** (step / max(1, self.total_steps - 1))


@dataclass(frozen=True)
class LrRange:
    """What `lr_find` returns.

    lrs, losses   the learning rate of each step and its loss, up to where the run diverged
    smoothed      the running mean of the losses
    suggestion    the rate at which the smoothed loss falls fastest
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float

    def plot(self, path: str | Path) -> Path:
        """Draw loss over learning rate into an image file (.png, .svg or .pdf) and return its path."""
        figure = new_figure(f"suggested learning rate: {self.suggestion:.2g}", 5.2, 3.8)
        axes = add_axes(figure, 1, 1, 1, x="learning rate", y="loss")
        axes.plot(self.lrs, self.losses, color=LIGHT["low"], linewidth=1, label="each step")
        axes.plot(self.lrs, self.smoothed, linewidth=2, label="running mean")
        axes.axvline(self.suggestion, color=LIGHT["pick"], linestyle="--", linewidth=1.2, label="steepest descent")
        axes.set_xscale("log")
        add_legend(axes)
        return save_figure(figure, require_path("path", path))

    def __repr__(self) -> str:
        return f"<LrRange: {len(self.lrs)} steps up to {self.lrs[-1]:.2g}, suggestion {self.suggestion:.2g}>"


class _Watch:
    """The engine's Monitor: asks for a stop when the loss is no longer a number."""

    stop = False

    def report(self, step: int, loss: float, correct: int | None) -> None:
        self.stop = not math.isfinite(loss)


ADVICE = {
    "epochs": ": pass steps=, the number of steps",
    "lr": ": pass min_lr= and max_lr=",
    "schedule": ": the learning rate rises from min_lr= to max_lr=",
}


def lr_find(
    model: nn.Module, x: Any, y: Any, *, min_lr: float = 1e-7, max_lr: float = 10.0, steps: int = 100,
    sample_weight: Any = None, **options: Any,
) -> LrRange:  # fmt: skip
    """Train a copy of the model for `steps` steps while the learning rate rises from `min_lr` to `max_lr`.

    options: those of `fit` that shape a step, such as batch_size, optimizer and loss. The model itself does not change.
    Raises OnelaunchError for a mistake, and if the loss is not finite from the start.
    """
    steps = require_integer("steps", steps, "a number of steps, 10 or more")
    if steps < 10:
        raise OnelaunchError(f"steps={steps} must be 10 or more: fewer do not show a curve")
    for name, value in (("min_lr", min_lr), ("max_lr", max_lr)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentTypeError(f"{name}={value!r:.60} is not a number")
    if not 0 < min_lr < max_lr < 1e30:
        raise OnelaunchError(
            f"min_lr={min_lr} and max_lr={max_lr} must be positive numbers below 1e30, the first one smaller"
        )
    known = {field.name for field in dataclasses.fields(Options)} - {
        "epochs",
        "schedule",
        "lr",
        "metrics",
        "early_stopping",
    }
    if unknown := sorted(options.keys() - known):
        hint = suggest(unknown[0], known) or f": it has {', '.join(sorted(known))}"
        hint = ADVICE.get(unknown[0], hint)
        raise ArgumentTypeError(f"lr_find has no argument {unknown[0]!r}{hint}")
    copied = copy.deepcopy(model)
    run = make_run(copied, x, y, None, {**options, "steps": steps, "lr": max_lr}, sample_weight=sample_weight)
    fields = {field.name: getattr(run.spec, field.name) for field in dataclasses.fields(Spec)}
    # "linear" stands for a rate that changes: engines compute the rates of such a schedule step by step, by `lr_at`.
    spec = RangeSpec(**{**fields, "schedule": "linear"}, min_lr=min_lr)
    losses = _train(dataclasses.replace(run, spec=spec))
    lrs = [spec.lr_at(step) for step in range(steps)]
    return _result(lrs, losses)


def _train(run: Run) -> list[float]:
    session = _engine(run).start(run, {})
    losses: list[float] = []
    try:
        for segment in session.segments(0, _Watch()):
            losses += segment.losses.tolist()
            if not torch.isfinite(segment.losses).all():
                break
    finally:
        session.close()
    return losses


def _engine(run: Run) -> Engine:
    """The fastest engine that takes its learning rates from the host."""
    if run.spec.engine == "auto":
        native = engine_or_reason("cpu", run.device)
        name = "eager" if isinstance(native, str) or native.unsupported_reason(run) else "cpu"
        run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, engine=name))
    return choose(run)[0]


def _result(lrs: list[float], losses: list[float]) -> LrRange:
    smoothed: list[float] = []
    mean, best = 0.0, math.inf
    for number, loss in enumerate(losses):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        value = mean / (1 - SMOOTHING ** (number + 1))
        if not math.isfinite(value) or (number > SKIPPED and value > BREAKS * best):
            break
        smoothed.append(value)
        best = min(best, value)
    if len(smoothed) <= SKIPPED + 1:
        raise OnelaunchError("the loss diverges from the first steps on: scale x and y, or pass a smaller min_lr")
    slopes = np.gradient(np.array(smoothed[SKIPPED:]), np.log(lrs[SKIPPED : len(smoothed)]))
    count = len(smoothed)
    return LrRange(lrs[:count], losses[:count], smoothed, lrs[SKIPPED + int(np.argmin(slopes))])
