"""What `onelaunch bench` prints about the errors of estimators: beside each table, and over all tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from onelaunch.bench.busy import BUSY
from onelaunch.bench.case import OURS
from onelaunch.bench.tabular import MLP, NEAR, SCALED_MLP, TREES, mean_error, of_best_tree, summarise
from onelaunch.cli.table import print_line, print_table
from onelaunch.format import format_seconds


def show_errors(console: Console, result: dict[str, Any]) -> None:
    """The mean errors of a case: the fraction of wrong classes, or the root of the mean squared error."""
    found = ", ".join(f"{name} {mean_error(result, name):.4g}" for name in result["errors"])
    print_line(console, f"error: {found}")
    if set(TREES) <= result["errors"].keys():
        near = "within" if of_best_tree(result) <= NEAR else "not within"
        print_line(console, f"{near} 2 % of the error of the better of random forest and gradient boosting")


def show_summary(console: Console, cases: Sequence[dict[str, Any]]) -> None:
    """Ranks and times over all cases with errors; nothing without one."""
    cases = [case for case in cases if case.get("errors")]
    summary = summarise(cases) if cases else {}
    if not summary:
        return
    seconds = summary["fit_seconds"]
    rows = [[name, f"{rank:.2f}", format_seconds(seconds[name])] for name, rank in summary["mean_rank"].items()]
    print_table(
        console, f"{summary['tables']} table{'s' * (summary['tables'] > 1)}", ["", "mean rank", "fit, total"], rows
    )
    print_line(console, f"near the best tree ensemble: {summary['near_best_tree']} of {summary['tables']}")
    unseen = f"{summary['unseen_near_best_tree']} of {summary['unseen']}"
    print_line(console, f"the same on the tables that played no part in the choice of our defaults: {unseen}")
    busy = any(case.get("busy") for case in cases)
    for peer in (peer for peer in (MLP, SCALED_MLP) if peer in seconds):
        factor = BUSY if busy else f"{seconds[peer] / seconds[OURS]:.1f} times faster"
        print_line(console, f"fit time against {peer}: {factor}")
