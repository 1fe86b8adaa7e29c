"""The figure of a sweep: the metric over each parameter, and the curves of the best candidates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onelaunch.colours import LIGHT
from onelaunch.integers import ceil_div
from onelaunch.sweep.member import Record
from onelaunch.sweep.ranking import Row
from onelaunch.sweep.table import Table
from onelaunch.train.figure_style import add_axes, add_legend, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = 5  # candidates whose curves are drawn
COLUMNS = 3
LOG_FROM = 10  # the ratio of a parameter's values from which its axis is logarithmic
MAX_NAMES = 8  # of a scale with names, before they are turned
MAX_LETTERS = 40  # of a name in the figure


Records = Mapping[int, Record]


def draw_sweep(table: Table, records: Records, path: Path) -> Path:
    """Write the figure to `path`, whose suffix (.png, .svg or .pdf) selects the format, and return `path`."""
    names = [name for name in table.names if len({repr(row.parameters.get(name)) for row in table}) > 1]
    rows = ceil_div(len(names) + 1, COLUMNS)
    columns = min(COLUMNS, len(names) + 1)
    title = f"{len(table):,} candidates, {len(records):,} members; a star marks the best"
    heading = _plain(table.heading)
    figure = new_figure(title, 4.2 * columns, 3.4 * rows)
    for number, name in enumerate(names, 1):
        _draw_parameter(add_axes(figure, rows, columns, number, x=_plain(name), y=heading), table, name)
    axes = add_axes(figure, rows, columns, len(names) + 1, x="epoch", y=heading)
    _draw_curves(axes, table, records)
    return save_figure(figure, path)


def _plain(text: str) -> str:
    """The text for Matplotlib: short, and with dollar signs that do not begin a formula."""
    short = text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 1]}…"
    return short.replace("$", r"\$")


def scale_of(values: list[Any]) -> str:
    """ "log", "linear" or "names": the scale that suits a parameter's values."""
    if not values:  # every member failed
        return "linear"
    if not all(map(_is_number, values)):
        return "names"
    positive = [value for value in values if value > 0]
    if len(positive) == len(values) and max(positive) >= LOG_FROM * min(positive):
        return "log"
    # Zero beside values of several magnitudes has no place on either scale.
    return (
        "names"
        if len(set(values)) <= MAX_NAMES and positive and max(positive) >= LOG_FROM * min(positive)
        else "linear"
    )


def _is_number(value: Any) -> bool:
    """Whether an axis of numbers has a place for the value, which an integer past the range of float64 has not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _draw_parameter(axes: Axes, table: Table, name: str) -> None:
    rows = [row for row in table if name in row.parameters and not math.isnan(row.mean)]
    values = [row.parameters[name] for row in rows]
    scale = scale_of(values)
    places: list[Any] = values
    if scale == "names":
        known = {text: position for position, text in enumerate(names_of(values))}
        places = [known[str(value)] for value in values]
        axes.set_xticks(list(known.values()), list(map(_plain, known)), rotation=45 if len(known) > MAX_NAMES else 0)
    elif scale == "log":
        axes.set_xscale("log")
    axes.plot(places, [row.mean for row in rows], "o", markersize=5, alpha=0.6, linestyle="none", markeredgewidth=0)
    best = table.rows[0]
    if rows and best is rows[0]:
        axes.plot(places[0], best.mean, "*", markersize=13, color=LIGHT["pick"])


def names_of(values: list[Any]) -> list[str]:
    """The different values as text, in their order if they have one."""
    try:
        ordered = sorted(values)
    except Exception:  # the values' own comparison may raise anything: that of two tensors is a RuntimeError
        ordered = values
    return list(dict.fromkeys(map(str, ordered)))


def mean_curve(records: Records, row: Row, metric: str) -> np.ndarray[Any, Any]:
    """The metric after every epoch, the mean over the row's members without failures; empty if there are none."""
    curves = [records[index].curve(metric) for index in row.members if not records[index].error]
    shortest = min(map(len, curves), default=0)
    return np.mean([curve[:shortest] for curve in curves], axis=0) if shortest else np.empty(0)


def _draw_curves(axes: Axes, table: Table, records: Records) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, row in enumerate(table.rows[:CURVES], 1):
        curve = mean_curve(records, row, table.metric)
        axes.plot(np.arange(1, len(curve) + 1), curve, linewidth=2, label=f"{number}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(axes, title="rank")
