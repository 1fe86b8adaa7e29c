"""The figure of a run: the loss of every step with its epoch means, and the accuracy over the epochs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic
from onelaunch.integers import ceil_div

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
MAX_POINTS = 4000  # more than a figure has pixels; longer runs are drawn as means of equal stretches
Epochs = list[dict[str, Any]]  # as in `History.epochs`


def draw(losses: list[float], epochs: Epochs, title: str, path: Path) -> Path:
    """Write the figure to `path`, whose suffix (.png, .svg or .pdf) selects the format, and return `path`."""
    has_accuracy = any(epoch["accuracy"] is not None for epoch in epochs)
    figure, axes = new_axes(title, columns=2 if has_accuracy else 1)
    _draw_loss(axes, losses, epochs)
    if has_accuracy:
        _draw_accuracy(figure.add_subplot(1, 2, 2), epochs)
    return save_figure(figure, path)


def new_axes(title: str, columns: int = 1) -> tuple[Figure, Axes]:
    """A figure with room for `columns` axes, and the first of them."""
    from matplotlib.figure import Figure  # no pyplot: no backend, no global state, safe in threads

    figure = Figure(figsize=(10 if columns == 2 else 6, 4), layout="constrained", dpi=150)
    figure.suptitle(title, fontsize=10)
    return figure, figure.add_subplot(1, columns, 1)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure to `path` and return it; raises OnelaunchError for another suffix than .png, .svg or .pdf."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise OnelaunchError(f"path={str(path)!r} must end in .png, .svg or .pdf")
    image = io.BytesIO()
    figure.savefig(image, format=kind)
    try:
        write_atomic(path, image.getvalue())
    except OSError as error:
        raise OnelaunchError(f"path={str(path)!r} cannot be written: {error.strerror}") from error
    return path


def _draw_loss(axes: Axes, losses: list[float], epochs: Epochs) -> None:
    stretch = max(1, ceil_div(len(losses), MAX_POINTS))
    whole = len(losses) // stretch * stretch
    if whole:
        thinned = np.asarray(losses[:whole]).reshape(-1, stretch).mean(axis=1)
        axes.plot(np.arange(len(thinned)) * stretch + 1, thinned, color="0.75", linewidth=0.8, label="each step")
    axes.plot([e["step"] for e in epochs], [e["loss"] for e in epochs], "o-", markersize=3, label="epoch mean")
    validated = [epoch for epoch in epochs if epoch["validation"]]
    if validated:
        values = [epoch["validation"]["loss"] for epoch in validated]
        axes.plot([epoch["step"] for epoch in validated], values, "s-", markersize=3, label="validation")
    if whole and min(losses) > 0:
        axes.set_yscale("log")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_accuracy(axes: Axes, epochs: Epochs) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = [epoch["epoch"] + 1 for epoch in epochs]
    axes.plot(numbers, [100 * epoch["accuracy"] for epoch in epochs], "o-", markersize=3, label="training")
    validated = [epoch for epoch in epochs if epoch["validation"]]
    if validated:
        values = [100 * epoch["validation"]["accuracy"] for epoch in validated]
        label = f"validation ({values[-1]:.2f} % at the end)"
        axes.plot([epoch["epoch"] + 1 for epoch in validated], values, "s-", markersize=3, label=label)
    axes.set(xlabel="epoch", ylabel="accuracy, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
