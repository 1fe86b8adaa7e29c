"""Writes a sweep as one HTML page that needs no network and no other file."""

from __future__ import annotations

import importlib.resources
import json
import math
from pathlib import Path
from typing import Any

from onelaunch.colours import colour_rules
from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.files import write_atomic
from onelaunch.run.metric_names import is_loss
from onelaunch.sweep.draw import Records, mean_curve, scale_of
from onelaunch.sweep.table import Table
from onelaunch.train.history import json_ready

CURVES = 12  # candidates whose curves the page can show


def write_page(table: Table, records: Records, about: dict[str, Any], path: Path) -> Path:
    """`about`: the number of `members`, the `seconds` they took and the `plan`."""
    if not path.name:
        raise OnelaunchError(f"path={str(path)!r} has no file name: pass one such as sweep.html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, page(table, records, about).encode("utf-8", "replace"))
    except (OSError, ValueError) as error:
        raise OnelaunchError(
            f"path={str(path)!r} cannot be written: {reason_of(error)}; pass a writable path"
        ) from error
    return path


def page(table: Table, records: Records, about: dict[str, Any]) -> str:
    template = importlib.resources.files("onelaunch.sweep").joinpath("page.html").read_text(encoding="utf-8")
    # A value may hold anything, "</script>" too.
    data = json.dumps(content(table, records, about), allow_nan=False).replace("<", "\\u003c")
    data = data.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace("{{colours}}", colour_rules(":root")).replace("{{data}}", data)


def content(table: Table, records: Records, about: dict[str, Any]) -> dict[str, Any]:
    """What the page shows, ready for JSON. Values are numbers on numeric scales, and texts otherwise."""
    parameters: list[dict[str, Any]] = []
    for name in table.names:
        values = [row.parameters[name] for row in table if name in row.parameters]
        if len({repr(value) for value in values}) > 1:
            scale = scale_of(values)
            texts = [] if scale != "names" else _sorted_texts(values)
            parameters.append({"name": name, "scale": scale, "names": texts})
    fixed = {name: str(value) for name in table.names for value in [table.rows[0].parameters.get(name)]
             if name not in [parameter["name"] for parameter in parameters]}  # fmt: skip
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


def _sorted_texts(values: list[Any]) -> list[str]:
    try:
        ordered = sorted(set(values))
    except TypeError:
        ordered = list(values)
    return list(dict.fromkeys(map(str, ordered)))
