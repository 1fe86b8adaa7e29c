"""A sweep as one HTML page."""

from __future__ import annotations

import math
from typing import Any

from onelaunch.html_page import fill_page
from onelaunch.run.metric_names import is_loss
from onelaunch.sweep.draw import Records, mean_curve, names_of, scale_of
from onelaunch.sweep.table import Table
from onelaunch.train.history import json_ready

CURVES = 12  # candidates whose curves the page can show


def page(table: Table, records: Records, about: dict[str, Any]) -> str:
    """`about`: the number of `members`, the `seconds` they took and the `plan`."""
    return fill_page("onelaunch.sweep", content(table, records, about))


def content(table: Table, records: Records, about: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, ready for JSON. Values are numbers on numeric scales, and texts otherwise."""
    parameters: list[dict[str, Any]] = []
    fixed: dict[str, str] = {}
    for name in table.names:
        values = [row.parameters[name] for row in table if name in row.parameters]
        if len({repr(value) for value in values}) > 1:
            scale = scale_of(values)
            texts = [] if scale != "names" else names_of(values)
            parameters.append({"name": name, "scale": scale, "names": texts})
        elif values:
            fixed[name] = str(values[0]) + ("" if len(values) == len(table) else " (where it is given)")
    rows = [
        {
            "values": [
                _value(row.parameters.get(entry["name"]), entry["scale"]) for entry in parameters
            ],
            "mean": row.mean, "std": row.std, "members": len(row.members), "failed": len(row.failed),
            "steps": row.part, "complete": row.complete, "reason": row.failed[0] if row.failed else "",
        }
        for row in table
    ]  # fmt: skip
    curves = [mean_curve(records, row, table.metric).tolist() for row in table.rows[:CURVES]]
    return json_ready({
        "metric": table.heading, "percent": table.metric == "accuracy", "smaller_is_better": is_loss(table.metric),
        "parameters": parameters, "fixed": fixed, "rows": rows, "curves": curves, "finished": len(records), **about,
    })  # fmt: skip


def _value(value: Any, scale: str) -> Any:
    if value is None and scale != "names":
        return None
    if scale == "names":
        return str(value)
    return float(value) if math.isfinite(value) else None
