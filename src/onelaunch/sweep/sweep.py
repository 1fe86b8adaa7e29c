"""`ol.sweep`: train a grid of candidates together, with the fastest engine that can run them on this machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from onelaunch.engines import choose
from onelaunch.engines.contract import Run
from onelaunch.errors import ArgumentTypeError, OnelaunchError, UnsupportedError, abbreviate, require_option, suggest
from onelaunch.rng import check_seed
from onelaunch.run.generators import random_state_kept
from onelaunch.run.metric_names import VALIDATION_METRICS, require_metric
from onelaunch.run.options import CUSTOM_LOSS, Options
from onelaunch.sweep.active import MemberError, SplitError
from onelaunch.sweep.driver import Driver
from onelaunch.sweep.grid import OPTIONS, Candidate, Grid, candidates_of, make_grid
from onelaunch.sweep.identity import identity_of
from onelaunch.sweep.member import Member
from onelaunch.sweep.progress import make_sweep_progress
from onelaunch.sweep.result import Sweep
from onelaunch.sweep.runs import MemberRuns
from onelaunch.sweep.store import open_store
from onelaunch.train.argument_names import ELSEWHERE
from onelaunch.train.callbacks import Callback, check_callbacks

STRATEGIES = ("grid", "random", "halving")
ADVICE = {
    **ELSEWHERE, "resume": "not needed: a sweep continues in its checkpoint folder", "cv": "folds=", "n_iter": "n=",
    "param_grid": "grid=", "param_distributions": "grid=", "scoring": "metric=", "k": "folds=",
}  # fmt: skip


def sweep(
    make_model: Callable[..., nn.Module] | nn.Module,
    x: Any,
    y: Any = None,
    *,
    grid: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    strategy: str = "grid",
    n: int | None = None,
    folds: int | Sequence[tuple[Any, Any]] | None = None,
    validation: float | tuple[Any, Any] | None = None,
    rows: Sequence[Any] | None = None,
    bootstrap: bool = False,
    metric: str | None = None,
    sample_weight: Any = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    n_jobs: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """Train one network per combination of the grid's values, seed and split of the rows, and compare them.

    make_model: a function that returns a new model; the grid's values of its parameters are passed to it. Or a module, of
    which every member trains a copy.
    x, y: as in `fit`.
    grid: values by name, such as {"lr": [1e-3, 1e-2], "width": [64, 128], "seed": range(8)}. Names are the options of `fit`
    and the parameters of make_model. A list of such dicts means their union.
    strategy: "grid" trains every combination; "random" draws `n` of them (a name may then have a distribution of SciPy);
    "halving" trains all (or `n`) for a few epochs and lets the best third go on to three times as many, until the end.
    folds: the number of parts of the rows, each held out once for validation (with the classes' proportions), or a list of
    pairs (training rows, validation rows).
    validation: a pair (x, y), or the fraction of the rows to hold out, chosen by the member's seed as in `fit`.
    rows: a list of arrays of row numbers; every candidate is trained once on each.
    bootstrap: each member draws its training rows with replacement, by its seed.
    metric: what candidates are compared by: "accuracy" (the default where there are classes), "loss", or one of `metrics`.
    checkpoint: a folder that keeps finished members; the same call continues there after a stop or a crash.
    n_jobs: how many chunks of members joblib runs at a time, in its active backend (processes, Dask, Ray, Spark); each GPU of
    a machine takes a chunk. None trains here.
    **options: everything else that `fit` accepts, the same for all members: epochs, batch_size, optimizer, engine, ….

    A member is the run `torch.manual_seed(seed); model = make_model(…); ol.fit(model, …, seed=seed)`, to the same bits on a
    CPU. A member whose loss diverges, whose model cannot be made or run, or whose callback raises, is reported in the table
    and does not stop the others; OnelaunchError if no candidate can be trained. Ctrl-C ends the sweep, and the result has
    the finished members.
    """
    given = _check_options(options)
    require_option("strategy", strategy, STRATEGIES)
    called = check_callbacks(callbacks)
    checked = make_grid(grid, make_model)
    seed = check_seed(given.get("seed", 0))
    if checked.seeds is not None and "seed" in given:
        raise OnelaunchError(f"seed={seed} and grid['seed'] both say which seeds to use: pass one of the two")
    for name in checked.names:
        if name in given:
            raise OnelaunchError(
                f"{name}={given[name]!r:.60} and grid[{name!r}] both give it values: pass one of the two"
            )
    candidates = candidates_of(checked, strategy, n, seed)
    metric = _add_metric(metric, given, checked)
    runs = MemberRuns(
        make_model, x, y, options=_defaults() | given, validation=validation, sample_weight=sample_weight, folds=folds,
        rows=rows, bootstrap=bootstrap,
    )  # fmt: skip
    members = members_of(candidates, checked.seeds or (seed,), runs.splits.count)
    losses = []
    for first in _firsts(members):
        runs.check_arguments(first)
        losses.append(runs.spec(first, runs.count).loss)  # raises for an option that is not valid
    metric = _metric_for(metric, losses, runs.validates)
    if strategy == "halving" and not runs.validates:
        raise OnelaunchError("strategy='halving' compares candidates on validation rows: pass folds= or validation=")
    with random_state_kept():
        trial = _trial(members, runs)  # raises what is wrong with the data before anything is trained
    about = identity_of(members, given, strategy, metric, runs, trial) if checkpoint is not None else {}
    with open_store(checkpoint, about) as store:
        driver = Driver(members, runs, metric, store, make_sweep_progress(progress), called, n_jobs)
        return driver.run(halving=strategy == "halving")


def _firsts(members: Sequence[Member]) -> list[Member]:
    """The first member of each candidate."""
    found: dict[int, Member] = {}
    for member in members:
        found.setdefault(member.candidate, member)
    return list(found.values())


def _trial(members: Sequence[Member], runs: MemberRuns) -> Run:
    """The Run of the first candidate that can be trained, on one split at least. Raises OnelaunchError if none can.

    A mistake that all candidates have in common is raised as it is; else the error names the first candidate.
    """
    failed: list[tuple[Member, MemberError | UnsupportedError]] = []
    tried: set[tuple[str, int]] = set()
    of_the_rows: set[int] = set()  # candidates that other splits may train
    for member in (*_firsts(members), *members):
        if member.split and member.candidate not in of_the_rows:
            continue
        if (key := (runs.kind_of(member), member.split)) in tried:
            continue
        tried.add(key)
        try:
            run = runs.run(member)
            choose(run)
            return run
        except (MemberError, UnsupportedError) as error:
            failed.append((member, error))
            if isinstance(error, SplitError):
                of_the_rows.add(member.candidate)
    member, first = failed[0]
    mistake = first if isinstance(first, UnsupportedError) else first.__cause__
    if isinstance(mistake, OnelaunchError) and all(str(error) == str(first) for _, error in failed):
        raise mistake
    named = " ".join(str(member).split())
    raise OnelaunchError(f"no candidate can be trained; the first, {named}, failed: {first}") from mistake


def members_of(candidates: Sequence[Candidate], seeds: Sequence[int], splits: int) -> list[Member]:
    """All members, numbered: the splits of one seed are neighbours, then the seeds of one candidate."""
    found: list[Member] = []
    for number, parameters in enumerate(candidates):
        for seed in seeds:
            for split in range(splits):
                found.append(Member(len(found), number, parameters, check_seed(seed), split))
    return found


@functools.cache
def _defaults() -> dict[str, Any]:
    return {
        field.name: field.default for field in dataclasses.fields(Options) if field.default is not dataclasses.MISSING
    }


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in OPTIONS:
            own = [
                "grid",
                "strategy",
                "n",
                "folds",
                "validation",
                "rows",
                "bootstrap",
                "metric",
                "sample_weight",
                "callbacks",
            ]
            hint = f": here it is {ADVICE[name]}" if name in ADVICE else suggest(name, [*own, *OPTIONS])
            raise ArgumentTypeError(
                f"sweep has no argument {name!r}{hint or ': it has those of fit, and ' + ', '.join(own)}"
            )
    return options


def _add_metric(metric: Any, options: dict[str, Any], grid: Grid) -> str | None:
    """Check `metric`, and add one that engines do not compute to the options."""
    if metric is None:
        return None
    require_metric("metric", metric, VALIDATION_METRICS)
    if metric in ("loss", "accuracy"):
        return str(metric)
    for choice in (choice for part in grid.parts for choice in part.get("metrics", ())):
        if metric not in choice:
            raise OnelaunchError(f"metric={metric!r} is not among grid['metrics'] {abbreviate(choice)}: add it there")
    if metric not in options.get("metrics", ()):
        options["metrics"] = (*options.get("metrics", ()), metric)
    return str(metric)


def _metric_for(metric: str | None, losses: Sequence[str], validates: bool) -> str:
    """The metric to compare candidates of these losses by. Raises OnelaunchError if one of them does not have it."""
    without = [loss for loss in losses if loss not in ("cross_entropy", "bce_with_logits")]
    if metric == "accuracy" and without:
        which = "a loss function of your own" if without[0] == CUSTOM_LOSS else f"loss={without[0]!r}"
        raise OnelaunchError(f"metric='accuracy' has no meaning for {which}: pass metric='loss'")
    return metric or ("accuracy" if validates and not without else "loss")
