"""`onelaunch bench`: run benchmark cases and show them beside their peers; `bench diff`: compare two results files."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import typer
from rich.console import Console

from onelaunch.bench.busy import cores_taken_before, warning
from onelaunch.bench.diff import NOISY, compare_results, differences
from onelaunch.bench.results import check_writable, load_results, new_path, only_writer, save_results
from onelaunch.bench.run import check_limit, failures, run_cases, select
from onelaunch.bench.time_limit import QUICK_SECONDS
from onelaunch.cli.bench_case import show_case
from onelaunch.cli.table import print_line, print_table
from onelaunch.cli.tabular import show_summary
from onelaunch.errors import OnelaunchError, abbreviate_list
from onelaunch.format import format_seconds
from onelaunch.report.remarks import not_run

DIFF, LARGE, ZOO = "diff", "train/large/", "zoo"
BAD, GOOD = ("slower", "failed"), ("faster", "mended")


def run_bench(
    what: list[str],
    filter: str,
    quick: bool,
    limit: float | None,
    large: bool,
    out: Path | None,
    models: int,
    seed: int,
) -> None:
    if what[0] == DIFF:
        given = {"out": out, "filter": filter, "quick": quick, "limit": limit, "large": large}
        for name, value in given.items():
            if value not in (None, "", False):
                raise OnelaunchError(f"{name}={str(value)!r}: diff measures and saves nothing; leave out --{name}")
        _diff(what[1:])
        return
    if ZOO in what:
        if what != [ZOO]:
            raise OnelaunchError(f"groups={' '.join(what)!r}: zoo runs alone, each model in a process of its own")
        from onelaunch.cli.zoo import run_zoo_command

        run_zoo_command(filter, quick, limit, out, models, seed)
        return
    console = Console()
    chosen = [one for one in select(what, filter) if one.group != "train" or (LARGE in one.name) == large]
    if not chosen or (large and not any(LARGE in one.name for one in chosen)):
        raise OnelaunchError(f"large={large} leaves no case: {'leave out' if large else 'pass'} --large")
    check_limit(limit)
    if out is not None:
        check_writable(out)  # before minutes of measurements, not after
    path = out or new_path()
    _warn(console, warning(cores_taken_before()))
    with only_writer(path):
        results = run_cases(
            chosen, quick=quick, show=lambda result: show_case(console, result),
            announce=lambda words: typer.echo(f"case     {words}", err=True),
            save=lambda results: save_results(results, path), command=_command(what, filter, quick, limit, large),
            limit=limit,
        )  # fmt: skip
    if results["interrupted"] and not results["cases"]:
        if out is None:
            path.unlink(missing_ok=True)
        typer.echo("stopped  interrupted before the first case was done: nothing is saved", err=True)
        raise KeyboardInterrupt("announced")
    show_summary(console, results["cases"])
    skipped = Counter(result["check"] for result in results["cases"] if result["check"].startswith("skipped"))
    for reason, count in skipped.items():
        print_line(console, f"{count} case{'s' * (count > 1)} {reason}", "yellow")
    if results["left_out"]:
        _show_left_out(console, results["left_out"], quick, limit)
    _warn(console, warning(results["cores_taken"][-1]).replace("use", "used").replace("will be", "may be"))
    failed = failures(results)
    if failed:
        typer.echo(f"failed   {', '.join(failed)}", err=True)
    typer.echo(f"saved    {path}")
    if results["interrupted"]:
        typer.echo(f"stopped  interrupted; not run: {abbreviate_list(not_run(results)) or 'none'}", err=True)
        raise KeyboardInterrupt("announced")
    if failed:
        raise typer.Exit(1)


def _show_left_out(console: Console, names: list[str], quick: bool, limit: float | None) -> None:
    time = f"{QUICK_SECONDS:g} s per group with --quick" if limit is None else f"--limit {limit:g}"
    advice = "; run them with --filter, or all without --quick" if quick and limit is None else ""
    words = f"left out {len(names)} case{'s' * (len(names) > 1)} ({time}): {', '.join(names)}{advice}"
    _warn(console, words)


def _warn(console: Console, words: str) -> None:
    if words:
        console.print(words, style="yellow", highlight=False)  # wrapped: longer than some terminals are wide


def _command(groups: list[str], filter: str, quick: bool, limit: float | None, large: bool) -> str:
    """The command that repeats these measurements, without the file they are saved in."""
    flags = [*(["--filter", filter] if filter else []), *(["--quick"] if quick else [])]
    flags += ["--limit", f"{limit:g}"] if limit is not None else []
    flags += ["--large"] if large else []
    return shlex.join(["onelaunch", "bench", *groups, *flags])


def _diff(files: list[str]) -> None:
    if len(files) != 2:
        raise OnelaunchError(f"diff takes two results files (got {len(files)}): onelaunch bench diff OLD.json NEW.json")
    old, new = (load_results(Path(file)) for file in files)
    console = Console()
    changes = compare_results(old, new)
    rows = [
        [change.name, *("" if t is None else format_seconds(t) for t in (change.before, change.after)),
         *("" if r is None else f"{r - 1:+.1%}" for r in (change.ratio, change.noise, change.peers)), change.verdict]
        for change in changes
    ]  # fmt: skip
    styles = ["red" if c.verdict in BAD else "green" if c.verdict in GOOD else "" for c in changes]
    head = ["case", "before", "after", "change", "noise", "peers\nmoved", "verdict"]
    print_table(console, "new against old", head, rows, styles)
    noisy = [change.name for change in changes if change.verdict == NOISY]
    if noisy:
        line = f"{NOISY}: the spreads exceed the difference in {len(noisy)} of {len(changes)} cases"
        remedy = "take both again without --quick, on a machine with nothing else to do"
        print_line(console, f"{line}: {remedy}", "yellow")
    for line in differences(old, new):
        print_line(console, f"also different: {line}")
    if any(change.verdict in BAD for change in changes):
        raise typer.Exit(1)
