"""The errors of `onelaunch bench tabular` for `docs/results.md`: every table and contender, ranks, and total times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onelaunch.bench.tables import TABLES
from onelaunch.bench.tabular import NEAR, PREFIX, mean_error, of_best_tree, summarise
from onelaunch.format import format_percent, format_seconds


def error_rows(cases: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: the mean error of each contender over the folds, the lowest one in bold."""
    names = list(cases[0]["errors"])
    rows = []
    for case in cases:
        table, notes = TABLES[case["name"].removeprefix(PREFIX)], case["notes"]
        errors = {name: mean_error(case, name) for name in names if name in case["errors"]}
        least = min(errors.values())
        cells = [
            _shown(errors[name], table.classifies, errors[name] == least) if name in errors else "–" for name in names
        ]
        kind = "wrong classes" if table.classifies else "RMSE"
        title = f"{table.name} *" if table.unseen else table.name
        rows.append([title, notes["rows"], notes["inputs"], kind, *cells, f"{of_best_tree(case):.3f}"])
    return ["table", "rows", "inputs", "error", *names, "ours / best tree"], rows


def _shown(error: float, classifies: bool, least: bool) -> str:
    number = f"{error:,.0f}" if error >= 1000 else f"{error:.4g}"
    text = format_percent(error) if classifies else number
    return f"**{text}**" if least else text


def error_summary(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on all tables together."""
    found = summarise(cases)
    if not found:
        return []
    ranks = ", ".join(f"{name} {rank:.2f}" for name, rank in found["mean_rank"].items())
    times = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in found["fit_seconds"].items())
    near, unseen = (found[f"{part}near_best_tree"] for part in ("", "unseen_"))
    return [
        f"Mean rank by error over {found['tables']} tables (1 is best): {ranks}.",
        f"Our error is at most {NEAR:g} times that of the better of random forest and gradient boosting on {near} of "
        f"{found['tables']} tables, and on {unseen} of the {found['unseen']} marked *, which played no part in the choice of "
        "our defaults.",
        f"Median times of a fit, added up over the tables: {times}.",
    ]
