"""How a run predicts its held-out rows: confusion matrix and accuracy by class, or predicted against true; the mistakes."""

from __future__ import annotations

import re
from typing import Any

from onelaunch.format import format_number, format_percent
from onelaunch.report.draw_predictions import MAX_CLASSES, confusion_chart, share_chart, values_chart
from onelaunch.report.figure import Figure, Gallery, Part, Picture, Table

MAX_CONFUSIONS = 12  # rows of the table of the most frequent mistakes
BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")


def prediction_figures(found: dict[str, Any], identity: str, command: str) -> list[Figure]:
    """The figures of predictions.json (see `train/predictions.py`)."""
    if found.get("confusion"):
        return _class_figures(found, identity, command)
    return [_values(found["values"], found["rows"], identity, command)] if found.get("values") else []


def mistakes(found: dict[str, Any]) -> list[Part]:
    """The worst mistakes as images or as rows of a table; empty if there are none."""
    worst, classes = found.get("mistakes") or [], found.get("classes") or []
    frequent = [_frequent(classes, found["confusion"])] if len(classes) > MAX_CLASSES else []
    pictures = [
        Picture(one["image"], f"{one['true']} → {one['predicted']}", format_percent(one["probability"], 0))
        for one in worst
        if BASE64.fullmatch(one.get("image") or "")
    ]
    if pictures:
        note = "True class → predicted class, and the probability that the network gave to the wrong one."
        return [*frequent, Gallery("Worst mistakes", note, pictures)]
    rows = [one for one in worst if one.get("row")]
    if not rows:
        return frequent
    columns = ["true", "predicted"] if found.get("classes") is None else ["true", "predicted", "probability"]
    names = list(rows[0]["row"])
    cells = [
        [
            str(one.get("line", number)),
            *(_cell(one[key], key) for key in columns),
            *(one["row"].get(name, "") for name in names),
        ]
        for number, one in enumerate(rows, 1)
    ]
    head = ["line" if "line" in rows[0] else "row", *columns, *names]
    return [*frequent, Table("Worst mistakes on the held-out rows, the worst first", head, cells)]


def _frequent(classes: list[str], confusion: list[list[int]]) -> Part:
    """For so many classes that a matrix of them cannot be read."""
    wrong = sorted((entry for entry in confusion if entry[0] != entry[1]), key=lambda entry: -entry[2])
    rows = [[classes[true], classes[predicted], f"{count:,}"] for true, predicted, count in wrong[:MAX_CONFUSIONS]]
    return Table("The most frequent mistakes", ["true", "predicted", "held-out rows"], rows)


def _cell(value: float | str, column: str) -> str:
    if isinstance(value, str):
        return value
    return format_percent(value, 0) if column == "probability" else format_number(value, 4)


def _class_figures(found: dict[str, Any], identity: str, command: str) -> list[Figure]:
    classes, confusion = found["classes"], found["confusion"]
    totals, right = [0] * len(classes), [0] * len(classes)
    for true, predicted, count in confusion:
        totals[true] += count
        right[true] += count * (true == predicted)
    figures = []
    if len(classes) <= MAX_CLASSES:
        counts = [[0] * len(classes) for _ in classes]
        for true, predicted, count in confusion:
            counts[true][predicted] = count
        rows = [[name, *map(str, counts[number])] for number, name in enumerate(classes)]
        table = Table("Confusion matrix", ["true class, by prediction", *classes], rows)
        svg = confusion_chart(f"{identity}-confusion", "Confusion matrix", classes, counts)
        figures.append(Figure("Confusion matrix", svg, table, command, f"{found['rows']:,} held-out rows."))
    known = [number for number in range(len(classes)) if totals[number]]
    order = known if len(known) <= MAX_CLASSES else sorted(known, key=lambda number: right[number] / totals[number])
    shares = [(classes[n], right[n] / totals[n], format_percent(right[n] / totals[n])) for n in order[:MAX_CLASSES]]
    rows = [[classes[n], f"{totals[n]:,}", f"{right[n]:,}", format_percent(right[n] / totals[n])] for n in order]
    note = f"The {MAX_CLASSES} classes with the lowest accuracy, of {len(known)}." if len(known) > MAX_CLASSES else ""
    svg = share_chart(f"{identity}-classes", "Accuracy by class", shares)
    by_class = Table("Accuracy by class", ["class", "held-out rows", "right", "accuracy"], rows)
    return [*figures, Figure("Accuracy by class", svg, by_class, command, note)]


def _values(values: list[list[float]], rows: int, identity: str, command: str) -> Figure:
    svg = values_chart(f"{identity}-values", "Predicted against true", values)
    shown = [[format_number(true, 4), format_number(predicted, 4)] for true, predicted in values[:20]]
    table = Table("The first of these rows", ["true", "predicted"], shown)
    which = f"{len(values):,} of {rows:,} held-out rows" if len(values) < rows else f"{rows:,} held-out rows"
    return Figure("Predicted against true", svg, table, command, f"{which}. A perfect prediction lies on the line.")
