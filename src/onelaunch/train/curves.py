"""The picture of a run: loss of every step with its epoch means, and accuracy over the epochs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from onelaunch.train.history import History

FORMATS = ("png", "svg", "pdf")
MAX_POINTS = 4000  # more than a figure has pixels; longer runs are drawn as means of equal stretches


def draw(history: History, path: Path) -> Path:
    from matplotlib.figure import Figure  # no pyplot: no backend, no global state, safe in threads

    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise OnelaunchError(f"path={str(path)!r} must end in .png, .svg or .pdf")
    has_accuracy = any(epoch["accuracy"] is not None for epoch in history.epochs)
    figure = Figure(figsize=(10 if has_accuracy else 6, 4), layout="constrained", dpi=150)
    _draw_loss(figure.add_subplot(1, 2 if has_accuracy else 1, 1), history)
    if has_accuracy:
        _draw_accuracy(figure.add_subplot(1, 2, 2), history)
    figure.suptitle(f"{len(history.losses):,} steps on {history.engine}, {history.seconds:.3g} s", fontsize=10)
    image = io.BytesIO()
    figure.savefig(image, format=kind)
    try:
        write_atomic(path, image.getvalue())
    except OSError as error:
        raise OnelaunchError(f"path={str(path)!r} cannot be written: {error.strerror}") from error
    return path


def _draw_loss(axes: Axes, history: History) -> None:
    losses = np.asarray(history.losses)
    stretch = max(1, -(-len(losses) // MAX_POINTS))
    whole = len(losses) // stretch * stretch
    if whole:
        thinned = losses[:whole].reshape(-1, stretch).mean(axis=1)
        axes.plot(np.arange(len(thinned)) * stretch + 1, thinned, color="0.75", linewidth=0.8, label="each step")
    ends = [epoch["step"] for epoch in history.epochs]
    axes.plot(ends, [epoch["loss"] for epoch in history.epochs], "o-", markersize=3, label="epoch mean")
    checked = [epoch for epoch in history.epochs if epoch["validation"]]
    if checked:
        values = [epoch["validation"]["loss"] for epoch in checked]
        axes.plot([epoch["step"] for epoch in checked], values, "s-", markersize=3, label="validation")
    if whole and losses.min() > 0:
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_accuracy(axes: Axes, history: History) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [epoch["epoch"] + 1 for epoch in history.epochs]
    axes.plot(numbers, [100 * epoch["accuracy"] for epoch in history.epochs], "o-", markersize=3, label="training")
    checked = [epoch for epoch in history.epochs if epoch["validation"]]
    if checked:
        last = 100 * checked[-1]["validation"]["accuracy"]
        values = [100 * epoch["validation"]["accuracy"] for epoch in checked]
        label = f"validation ({last:.2f} % at the end)"
        axes.plot([epoch["epoch"] + 1 for epoch in checked], values, "s-", markersize=3, label=label)
    axes.set(xlabel="epoch", ylabel="accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
