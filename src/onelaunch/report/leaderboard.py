"""The section of several runs: a table that the reader can sort, and their curves on top of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from onelaunch.colours import SERIES
from onelaunch.format import NONE, format_count, format_number, format_percent, format_seconds
from onelaunch.report.draw import Line, line_chart, nan_for_null
from onelaunch.report.figure import Figure, Section, Table
from onelaunch.report.palette import Palette
from onelaunch.report.read import Source
from onelaunch.report.scale import is_wide
from onelaunch.report.training import network_of, result_of
from onelaunch.train.run_folder import DIGEST

SETTINGS = ("optimizer", "lr", "batch_size", "seed")


Runs = Sequence[tuple[Source, str]]  # each with the identity of its own section


def leaderboard(runs: Runs, identity: str, command: str, palette: Palette) -> Section:
    """The runs of the same data and measure stand together, the best of them first; the largest such group is at the top."""
    groups = _groups(runs)
    figures = []
    for number, group in enumerate(groups):
        drawn = [source for source, _ in group[:SERIES]]
        of = f" on {_data(drawn[0])}" if len(groups) > 1 else ""
        figures += [
            _curves(drawn, f"{identity}-{number}-{key}", what + of, key, command, palette)
            for key, what in (("loss", "Validation loss"), ("accuracy", "Validation accuracy"))
            if sum(bool(_values(source, key)[0]) for source in drawn) > 1
        ]
    note = f"The curves are those of the best {SERIES}." if max(map(len, groups)) > SERIES else ""
    statements = [("note", note)] if note else []
    return Section(identity, f"Leaderboard of {len(runs)} runs", [], [_table(groups)], figures, statements)


def _groups(runs: Runs) -> list[list[tuple[Source, str]]]:
    """The runs that can be ranked against each other, best first; the largest group first, runs without a result last."""
    found: dict[tuple[str, ...], list[tuple[Source, str]]] = {}
    for source, identity in runs:
        about, config = source.content["about"], source.content["config"]
        result = result_of(source.content)
        data = about.get(DIGEST) or config.get("data", "")
        key = (result.name, str(data), str(config.get("target"))) if result else ()
        found.setdefault(key, []).append((source, identity))

    def badness(entry: tuple[Source, str]) -> float:
        result = result_of(entry[0].content)
        if result is None or math.isnan(result.value):
            return math.inf
        return -result.value if result.higher_is_better else result.value

    order = sorted(found, key=lambda key: (not key, -len(found[key])))
    return [sorted(found[key], key=badness) for key in order]


def _data(source: Source) -> str:
    """`2024/houses.csv: price`, with the folder where it is given; the name of a data set that has no target column."""
    config = source.content["config"]
    name = PurePath(*PurePath(str(config.get("data", ""))).parts[-2:]).as_posix()
    return f"{name}: {config['target']}" if config.get("target") else name


def _table(groups: Sequence[Runs]) -> Table:
    ordered = [entry for group in groups for entry in group]
    settings = [
        name for name in SETTINGS if len({str(source.content["config"].get(name)) for source, _ in ordered}) > 1
    ]
    results = [result_of(source.content) for source, _ in ordered]
    kinds = {result.name for result in results if result}
    head = ["run", "data", kinds.pop() if len(kinds) == 1 else "result", "validation loss", "time", "engine", "network"]
    losses = [values[-1] if (values := _values(source, "loss")[1]) else None for source, _ in ordered]
    sizes = [len(group) for group in groups]
    result_keys = _grouped([result.value if result else None for result in results], sizes)
    loss_keys = _grouped(losses, sizes)
    rows, keys = [], []
    for number, ((source, _), result) in enumerate(zip(ordered, results, strict=True)):
        about, config = source.content["about"], source.content["config"]
        words = NONE if result is None else str(result) if head[2] != "result" else f"{result} {result.name}"
        rows.append(
            [source.name, _data(source), words, format_number(losses[number]), format_seconds(about.get("seconds")),
             about.get("engine", ""), network_of(source.content), *(str(config.get(name, NONE)) for name in settings)]
        )  # fmt: skip
        numbers = [result_keys[number], loss_keys[number], about.get("seconds")]
        keys.append([0, 0, *numbers, 0, 0, *(_number(config.get(name)) for name in settings)])
    starts = [sum(sizes[:number]) for number, size in enumerate(sizes) if size > 1]
    first = [number for number in starts if (best := results[number]) is not None and not math.isnan(best.value)]
    within = ", among runs of the same data and measure" if len(groups) > 1 else ""
    caption = f"Best first{within}; a click on a heading sorts by it"
    return Table(caption, [*head, *settings], rows, frozenset(first), keys, [identity for _, identity in ordered])


def _grouped(values: Sequence[float | None], sizes: Sequence[int]) -> list[float | None]:
    """Keys that sort the values within each group and keep the groups, of so many rows, together; None for NaN."""
    values = [None if value is None or math.isnan(value) else value for value in values]
    if len(sizes) == 1:
        return values
    keys: list[float | None] = []
    for number, size in enumerate(sizes):
        group = values[len(keys) : len(keys) + size]
        ordered = sorted({value for value in group if value is not None})
        keys += [None if value is None else ordered.index(value) - number * len(values) for value in group]
    return keys


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
