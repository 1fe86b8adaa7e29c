"""The look of every figure that matplotlib draws: the colours of the pages, light grid lines, no frame."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onelaunch.colours import LIGHT, OWN_COLOUR, SERIES
from onelaunch.errors import OnelaunchError, unwritable_reason
from onelaunch.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


def colour_of(name: str) -> str:
    """The colour that a name has on the pages too."""
    return series(OWN_COLOUR[name])


def series(number: int) -> str:
    return LIGHT[f"s{number % SERIES}"]


def new_figure(title: str, width: float, height: float) -> Figure:
    """An empty figure of this size in inches, with its title at the top left."""
    from matplotlib.figure import Figure  # no pyplot: no backend, no global state, safe in threads

    figure = Figure(figsize=(width, height), layout="constrained", dpi=150, facecolor=LIGHT["ground"])
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, wspace=0.04, hspace=0.06)  # type: ignore[union-attr, call-arg]
    figure.suptitle(title, x=0.02, ha="left", fontsize=11, fontweight="bold", color=LIGHT["text"])
    return figure


def add_axes(figure: Figure, rows: int, columns: int, number: int, *, x: str, y: str) -> Axes:
    """Axes number 1, 2, … of a grid. The name of the y axis stands above it, to be read without turning the head."""
    axes = figure.add_subplot(rows, columns, number)
    axes.set_prop_cycle(color=[series(index) for index in range(SERIES)])
    axes.set_xlabel(x, color=LIGHT["soft"], fontsize=9.5)
    axes.set_title(y, loc="left", color=LIGHT["soft"], fontsize=9.5)
    axes.tick_params(which="both", colors=LIGHT["soft"], labelsize=9, length=0)
    axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["soft"])
    return axes


def set_log_scale(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis for positive `values`, with plain numbers as ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def add_legend(axes: Axes, **options: Any) -> None:
    axes.legend(frameon=False, fontsize=9, labelcolor=LIGHT["text"], **options)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write the figure to `path` and return it; raises OnelaunchError for another suffix than .png, .svg or .pdf."""
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise OnelaunchError(f"path={str(path)!r} must end in .png, .svg or .pdf")
    image = io.BytesIO()
    figure.savefig(image, format=kind)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, image.getvalue())
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise OnelaunchError(f"path={str(path)!r} {unwritable_reason(error)}") from error
    return path
