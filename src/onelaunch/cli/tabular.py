"""`onelaunch bench tabular`: prints errors and times per table, then ranks and totals, and saves all of it as JSON."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from onelaunch.bench.case import OURS
from onelaunch.bench.results import check_writable
from onelaunch.bench.tabular import MLP, NEAR, SCALED_MLP, mean_error, of_best_tree, run_tables, select_tables
from onelaunch.cli.table import print_line, print_table
from onelaunch.files import write_atomic

FOLDS, QUICK_FOLDS = 5, 2


def run_tabular(filter: str, quick: bool, out: Path | None, command: str) -> None:
    tables = select_tables(filter)
    path = out or Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-tabular.json"
    check_writable(path) if out else path.parent.mkdir(parents=True, exist_ok=True)
    console = Console()
    results = run_tables(
        tables, folds=QUICK_FOLDS if quick else FOLDS, command=command,
        show=lambda name, result: _show(console, name, result),
        save=lambda results: write_atomic(path, json.dumps(results, indent=1) + "\n"),
    )  # fmt: skip
    for name, reason in results["left_out"].items():
        print_line(console, f"left out: {name} ({reason})", "yellow")
    if results["tables"]:
        _summary(console, results["summary"])
        typer.echo(f"saved    {path}")


def _show(console: Console, name: str, result: dict[str, Any]) -> None:
    kind = "fraction wrong" if result["classifies"] else "RMSE"
    ours = mean_error(result, OURS)
    rows = [
        [contender, f"{mean_error(result, contender):.4g}", f"{ours / (mean_error(result, contender) or ours or 1):.3f}",
         f"{sum(scores['seconds']) / len(scores['seconds']):.3g} s"]
        for contender, scores in result["scores"].items()
    ]  # fmt: skip
    title = f"{name}: {result['rows']:,} rows, {result['inputs']:,} inputs"
    print_table(console, title, ["", kind, "onelaunch /\nthis", "fit"], rows)
    near = "within" if of_best_tree(result) <= NEAR else "not within"
    print_line(console, f"{near} 2 % of the better of random forest and gradient boosting")


def _summary(console: Console, summary: dict[str, Any]) -> None:
    rows = [
        [name, f"{rank:.2f}", f"{summary['fit_seconds'][name]:.4g} s"] for name, rank in summary["mean_rank"].items()
    ]
    print_table(console, f"{summary['tables']} tables", ["", "mean rank", "fit, total"], rows)
    print_line(console, f"near the best tree ensemble: {summary['near_best_tree']} of {summary['tables']}")
    unseen = f"{summary['unseen_near_best_tree']} of {summary['unseen']}"
    print_line(console, f"the same on the tables that played no part in the choice of our defaults: {unseen}")
    for peer in (MLP, SCALED_MLP):
        factor = summary["fit_seconds"][peer] / summary["fit_seconds"][OURS]
        print_line(console, f"fit time: {factor:.1f} times faster than {peer}")
