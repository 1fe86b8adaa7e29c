"""`onelaunch bench zoo`: models drawn by a rule, each against the compiled step of PyTorch that was recorded by hand."""

from __future__ import annotations

import shlex
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import typer
from rich.console import Console

from onelaunch.bench.results import check_writable, new_path, only_writer, provenance, save_results
from onelaunch.bench.run import check_limit
from onelaunch.bench.zoo.draw import draw
from onelaunch.bench.zoo.run import run_zoo
from onelaunch.cli.bench_case import show_case
from onelaunch.cli.table import print_line
from onelaunch.errors import OnelaunchError
from onelaunch.report.benchmark import undecided

QUICK_MODELS = 6


def run_zoo_command(filter: str, quick: bool, limit: float | None, out: Path | None, models: int, seed: int) -> None:
    if models < 1:
        raise OnelaunchError(f"models={models} must be 1 or more")
    check_limit(limit)
    if not torch.cuda.is_available():
        raise OnelaunchError("what='zoo' needs a CUDA device, and this machine has none: leave it out")
    drawn = [one for one in draw(models, seed) if filter in one.title]
    if not drawn:
        raise OnelaunchError(
            f"filter={filter!r} is in the name of none of {models} drawn models: pass another --seed or --models"
        )
    wanted = min(models, QUICK_MODELS) if quick else models
    if out is not None:
        check_writable(out)
    console, path = Console(), out or new_path()
    options = {"--models": models, "--seed": seed, "--filter": filter, "--limit": limit}
    given = [text for name, value in options.items() if value not in ("", None) for text in (name, str(value))]
    command = shlex.join(["onelaunch", "bench", "zoo", *given, *(["--quick"] if quick else [])])
    results: dict[str, Any] = {
        **provenance(command), "quick": quick, "finished": False, "interrupted": False, "ceilings": {},
        "planned": [f"zoo/{one.title}" for one in drawn], "left_out": [], "cases": [],
    }  # fmt: skip

    def show(case: dict[str, Any]) -> None:
        results["cases"].append(case)
        save_results(results, path)
        if case["check"].startswith("skipped"):
            print_line(console, f"{case['name']}: {case['check']}", "yellow")
        else:
            show_case(console, case)

    with only_writer(path):
        typer.echo(f"zoo      {wanted} models compile side by side, then each is timed alone", err=True)
        try:
            run_zoo(drawn, seed, show, wanted=wanted, limit=limit)
            results["finished"] = True
        except KeyboardInterrupt:
            results["interrupted"] = True
            raise
        finally:
            save_results(results, path)
            show_summary(console, results["cases"])
            typer.echo(f"saved    {path}")


def show_summary(console: Console, cases: list[dict[str, Any]]) -> None:
    """The geometric mean over all models that have times, and those on which the peer is faster beyond the spread."""
    timed = [one for one in cases if one["check"] == "passed"]
    factors = {one["name"]: next(iter(one["ratio"].values())) for one in timed}
    if not factors:
        print_line(console, "no model was timed", "yellow")
        return
    slower = [
        f"{one['name']} ({factors[one['name']]:.3f})"
        for one in timed
        if factors[one["name"]] < 1 and not undecided(one)
    ]
    line = f"{len(timed)} models: {geometric_mean(factors.values()):.3f} times the speed of the recorded compiled step"
    print_line(console, f"{line}; slower on {', '.join(slower) or 'none'}")
