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


def draw(losses: list[float], epochs: Epochs, title: str, path: Path) -> Path:
    """Write the figure to `path`, whose suffix (.png, .svg or .pdf) selects the format, and return `path`."""
    columns = 2 if any(epoch["accuracy"] is not None for epoch in epochs) else 1
    figure = new_figure(title, 5.2 * columns, 3.8)
    _draw_loss(add_axes(figure, 1, columns, 1, x="step", y="loss"), losses, epochs)
    if columns == 2:
        _draw_accuracy(add_axes(figure, 1, columns, 2, x="epoch", y="accuracy, %"), epochs)
    return save_figure(figure, path)


def _draw_loss(axes: Axes, losses: list[float], epochs: Epochs) -> None:
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
    add_legend(axes)


def _draw_accuracy(axes: Axes, epochs: Epochs) -> None:
    from matplotlib.ticker import MaxNLocator

    _plot(axes, "training", [e["epoch"] + 1 for e in epochs], [100 * e["accuracy"] for e in epochs])
    validated = [epoch for epoch in epochs if epoch["validation"]]
    values = [100 * epoch["validation"]["accuracy"] for epoch in validated]
    end = f" ({values[-1]:.2f} % at the end)" if values else ""
    _plot(axes, "validation", [e["epoch"] + 1 for e in validated], values, end)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes)


def _plot(axes: Axes, name: str, x: list[int], y: list[float], remark: str = "") -> None:
    """A line with a marker at each point, as on the pages: a circle for training, a square for validation."""
    marker = "" if len(x) > MAX_MARKED else "o" if name == "training" else "s"
    if x:
        axes.plot(x, y, color=colour_of(name), marker=marker, markersize=4.5, linewidth=2, label=f"{name}{remark}")
