"""`onelaunch bench`: run benchmark cases and show them beside their peers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from onelaunch.bench.case import GROUPS
from onelaunch.bench.run import OURS, check_writable, failures, run_cases, save_results, select


def bench(
    group: Annotated[str, typer.Argument(help=f"all, {', '.join(GROUPS)}")] = "all",
    filter: Annotated[str, typer.Option(help="Only cases whose name contains this.")] = "",
    quick: Annotated[bool, typer.Option(help="Fewer repeats: a second a contender.")] = False,
    out: Annotated[Path | None, typer.Option(help="Save the results as JSON.")] = None,
) -> None:
    """Time onelaunch and its peers on the same work; what fails its check is not timed."""
    console = Console()
    if out is not None:
        check_writable(out)  # before minutes of timing, not after
    results = run_cases(select(group, filter), quick=quick, show=lambda result: _show(console, result))
    skipped = Counter(result["check"] for result in results["cases"] if result["check"].startswith("skipped"))
    for reason, count in skipped.items():
        console.print(f"{count} cases {reason}", style="yellow", markup=False, soft_wrap=True)
    if out is not None:
        save_results(results, out)
        typer.echo(f"saved    {out}")
    failed = failures(results)
    if failed:
        typer.echo(f"failed   {', '.join(failed)}", err=True)
    if results["interrupted"]:
        raise KeyboardInterrupt
    if failed:
        raise typer.Exit(1)


def _show(console: Console, result: dict[str, Any]) -> None:
    if result["check"] != "passed":
        if not result["check"].startswith("skipped"):  # those are counted at the end
            line = f"{result['name']}: check {result['check']}; not timed"
            console.print(line, style="red", markup=False, soft_wrap=True)
        return
    table = Table(title=f"{result['name']}: {result['about']}", title_justify="left", title_style="")
    table.add_column("")
    for column in (f"median, µs a {result['unit']}", "minimum", "quartiles", "n", "spread", "onelaunch is"):
        table.add_column(column, justify="right")
    if result["peak_bytes"]:
        table.add_column("peak MiB", justify="right")
    for name, timing in result["times"].items():
        ratio = "" if name == OURS else f"{result['ratio'][name]:.2f}× faster"
        low, high = (f"{1e6 * value:.4g}" for value in timing["quartiles"])
        table.add_row(
            name, f"{1e6 * timing['median']:.4g}", f"{1e6 * timing['minimum']:.4g}", f"{low} – {high}",
            str(timing["n"]), f"{timing['spread']:.1%}", ratio,
            *([f"{result['peak_bytes'][name] / 2**20:.1f}"] if name in result["peak_bytes"] else []),
        )  # fmt: skip
    console.print(table)
    for name, reason in result["absent"].items():
        console.print(f"absent: {name} ({reason})", markup=False, highlight=False, soft_wrap=True)
    if result["floor_share"] is not None:
        console.print(f"{result['floor_share']:.0%} of the floor's speed")
