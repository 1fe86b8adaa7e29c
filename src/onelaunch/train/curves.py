"""The figure of a run: the loss of every step with its epoch means, and the accuracy over the epochs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onelaunch.colours import LIGHT
from onelaunch.integers import ceil_div
from onelaunch.train.figure_style import add_axes, add_legend, colour_of, new_figure, save_figure, set_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 4000  # more than a figure has pixels; longer runs are drawn as means of equal stretches
MAX_MARKED = 30  # epochs; lines of more have no markers
Epochs = list[dict[str, Any]]  # as in `History.epochs`


def draw(losses: list[float], epochs: Epochs, title: str, path: Path, best: int | None = None) -> Path:
    """Write the figure to `path`, whose suffix (.png, .svg or .pdf) selects the format, and return `path`.

    best: the epoch whose weights the model has, if that is not the last; it is marked.
    """
    columns = 2 if any(epoch["accuracy"] is not None for epoch in epochs) else 1
    figure = new_figure(title, 5.2 * columns, 3.8)
    kept = epochs[best] if best is not None and best < len(epochs) else None
    _draw_loss(add_axes(figure, 1, columns, 1, x="step", y="loss"), losses, epochs, kept)
    if columns == 2:
        _draw_accuracy(add_axes(figure, 1, columns, 2, x="epoch", y="accuracy, %"), epochs, kept)
    return save_figure(figure, path)


def _draw_loss(axes: Axes, losses: list[float], epochs: Epochs, kept: dict[str, Any] | None) -> None:
    stretch = max(1, ceil_div(len(losses), MAX_POINTS))
    whole = len(losses) // stretch * stretch
    if whole:
        thinned = np.asarray(losses[:whole]).reshape(-1, stretch).mean(axis=1)
        axes.plot(np.arange(len(thinned)) * stretch + 1, thinned, color=LIGHT["low"], linewidth=1, label="each step")
    _plot(axes, "training", [e["step"] for e in epochs], [e["loss"] for e in epochs])
    validated = [epoch for epoch in epochs if epoch["validation"]]
    _plot(axes, "validation", [e["step"] for e in validated], [e["validation"]["loss"] for e in validated])
    if whole and min(losses) > 0:
        set_log_scale(axes, losses)
    _mark(axes, kept, "step")
    add_legend(axes)


def _draw_accuracy(axes: Axes, epochs: Epochs, kept: dict[str, Any] | None) -> None:
    from matplotlib.ticker import MaxNLocator

    _plot(axes, "training", [e["epoch"] + 1 for e in epochs], [100 * e["accuracy"] for e in epochs])
    validated = [epoch for epoch in epochs if epoch["validation"]]
    values = [100 * epoch["validation"]["accuracy"] for epoch in validated]
    where = "at the end" if kept is None else f"in epoch {kept['epoch'] + 1}"
    shown = [100 * kept["validation"]["accuracy"]] if kept and kept["validation"] else values[-1:]
    _plot(
        axes,
        "validation",
        [e["epoch"] + 1 for e in validated],
        values,
        "".join(f" ({one:.2f} % {where})" for one in shown),
    )
    _mark(axes, kept, "epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes)


def _mark(axes: Axes, kept: dict[str, Any] | None, x: str) -> None:
    """A vertical line at the epoch whose weights the model has."""
    if kept is not None:
        axes.axvline(
            kept[x] + (x == "epoch"), color=LIGHT["low"], linestyle="--", linewidth=1.5, label="best epoch", zorder=0
        )


def _plot(axes: Axes, name: str, x: list[int], y: list[float], remark: str = "") -> None:
    """A line with a marker at each point, as on the pages: a circle for training, a square for validation."""
    marker = "" if len(x) > MAX_MARKED else "o" if name == "training" else "s"
    if x:
        axes.plot(x, y, color=colour_of(name), marker=marker, markersize=4.5, linewidth=2, label=f"{name}{remark}")
