"""The section of several runs: a table that the reader can sort, and their curves on top of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from onelaunch.colours import SERIES
from onelaunch.format import NONE, format_count, format_number, format_percent, format_seconds
from onelaunch.report.draw import Line, line_chart, nan_for_null
from onelaunch.report.figure import Figure, Section, Table
from onelaunch.report.palette import Palette
from onelaunch.report.read import Source
from onelaunch.report.scale import is_wide
from onelaunch.report.training import network_of, result_of

SETTINGS = ("optimizer", "lr", "batch_size", "seed")


def leaderboard(runs: Sequence[tuple[Source, str]], identity: str, command: str, palette: Palette) -> Section:
    """`runs`: each run with the identity of its own section. Those with the most common kind of result come first, the best
    of them at the top."""
    kinds = [result.name for source, _ in runs if (result := result_of(source.content))]
    kind = max(kinds, key=kinds.count) if kinds else ""

    def badness(entry: tuple[Source, str]) -> tuple[bool, float]:
        result = result_of(entry[0].content)
        if result is None or result.name != kind:
            return True, math.inf
        return False, -result.value if result.higher_is_better else result.value

    ordered = sorted(runs, key=badness)
    drawn = [source for source, _ in ordered[:SERIES]]
    figures = [
        _curves(drawn, f"{identity}-{key}", what, key, command, palette)
        for key, what in (("loss", "Validation loss"), ("accuracy", "Validation accuracy"))
        if sum(bool(_values(source, key)[0]) for source in drawn) > 1
    ]
    note = f"The curves are those of the best {SERIES}." if len(runs) > SERIES else ""
    statements = [("note", note)] if note else []
    return Section(identity, f"Leaderboard of {len(runs)} runs", [], [_table(ordered, kind)], figures, statements)


def _table(ordered: Sequence[tuple[Source, str]], kind: str) -> Table:
    settings = [
        name for name in SETTINGS if len({str(source.content["config"].get(name)) for source, _ in ordered}) > 1
    ]
    head = ["run", kind or "result", "validation loss", "time", "engine", "network", *settings]
    rows, keys = [], []
    for source, _ in ordered:
        about, config = source.content["about"], source.content["config"]
        result, seconds = result_of(source.content), about.get("seconds")
        losses = _values(source, "loss")[1]
        words = NONE if result is None else str(result) if result.name == kind else f"{result} {result.name}"
        loss = losses[-1] if losses else None
        rows.append(
            [source.name, words, format_number(loss), format_seconds(seconds), about.get("engine", ""),
             network_of(source.content), *(str(config.get(name, NONE)) for name in settings)]
        )  # fmt: skip
        numbers = [result.value if result and result.name == kind else None, loss, seconds]
        keys.append([0, *numbers, 0, 0, *(_number(config.get(name)) for name in settings)])
    caption = "Best first; a click on a heading sorts by it"
    return Table(caption, head, rows, frozenset([0]), keys, [identity for _, identity in ordered])


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) else 0 if isinstance(value, str) else None


def _values(source: Source, key: str) -> tuple[list[int], list[float]]:
    """Steps or epochs, and the validation metric `key` there."""
    validated = [e for e in source.content["epochs"] if (e.get("validation") or {}).get(key) is not None]
    place: Callable[[dict[str, Any]], int] = (lambda e: e["step"]) if key == "loss" else (lambda e: e["epoch"] + 1)
    return [place(e) for e in validated], nan_for_null(e["validation"][key] for e in validated)


def _curves(runs: Sequence[Source], identity: str, title: str, key: str, command: str, palette: Palette) -> Figure:
    share = key == "accuracy"
    lines = []
    for source in runs:
        x, y = _values(source, key)
        if x:
            lines.append(Line(source.name, x, [100 * value for value in y] if share else y))
    wide = not share and is_wide(value for line in lines for value in line.y)
    x_label, y_label = ("epoch", "accuracy, %") if share else ("step", "loss")
    svg = line_chart(
        identity, title, lines, x_label=x_label, y_label=y_label, write_x=format_count, log_y=wide, palette=palette
    )
    write = (lambda value: format_percent(value / 100, 2)) if share else format_number
    best = max if share else min
    rows = [[line.name, str(len(line.y)), write(best(line.y)), write(line.y[-1])] for line in lines]
    return Figure(title, svg, Table(title, ["run", "validations", "best", "last"], rows), command)
