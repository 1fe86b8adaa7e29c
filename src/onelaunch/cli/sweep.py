"""`onelaunch sweep CONFIG`: trains every combination of the lists in a config, and keeps table, page and best model."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer
from rich.console import Console
from torch import nn

from onelaunch.cli.config import TrainConfig, as_toml, is_grid, make_config, merge, read_config
from onelaunch.cli.run_data import load_data, options_of, weight_by_number
from onelaunch.cli.say import say
from onelaunch.cli.train import build, fits_into_memory, train_into, widths_of
from onelaunch.data import Dataset
from onelaunch.device import default_device
from onelaunch.errors import OnelaunchError, abbreviate, unwritable_reason
from onelaunch.files import write_atomic
from onelaunch.run.options import Options
from onelaunch.sweep import Sweep, sweep
from onelaunch.sweep.spread import LOST, LostWorkerError
from onelaunch.sweep.store import PARTS
from onelaunch.train.run_folder import BEST, CONFIG, LOCK, RunFolder

OWN = {"strategy": str, "n": int, "folds": int, "metric": str, "n_jobs": int}  # keys of the file that `train` has not
ARCHITECTURE = ("hidden", "layers", "activation", "dropout", "batch_norm")
MEMBERS, TABLE, PAGE, FIGURE = "members", "table.csv", "sweep.html", "sweep.png"
WEIGHT = "class_weight"
GRID = "sweep.toml"  # the config with the flags; a folder with a config.toml would be that of a run


@dataclass(frozen=True)
class Plan:
    """A checked config: the settings that all members share, the lists, and the arguments of `ol.sweep` alone."""

    settings: TrainConfig
    grid: dict[str, list[Any]]
    own: dict[str, Any]


def run_sweep(config: Path, own: dict[str, Any], progress: bool, flags: dict[str, Any]) -> None:
    from_file = read_config(config)
    plan = make_plan(from_file, own, flags)
    dataset, settings = load_data(plan.settings)
    folder = _folder(settings.out, config)
    again = shlex.join(("onelaunch", "sweep", str(folder / GRID), "--out", str(folder)))
    with _says_how_to_continue(folder, again):
        if not (folder / GRID).exists():  # an earlier start's stays: with another config it does not continue
            _write(folder / GRID, as_toml(merge({**from_file, **own}, flags)))
        result = _compare(folder, plan, settings, dataset, progress, again)
        _report(folder, result)
        if result.interrupted:
            raise KeyboardInterrupt
        if len(result.failures) == len(result.members):
            raise typer.Exit(1)  # the table says why, and there is no best model
        _train_best(folder / BEST, plan, settings, dataset, result, progress)


@contextmanager
def _says_how_to_continue(folder: Path, again: str) -> Iterator[None]:
    """Print the command that continues the sweep in `folder` if Ctrl-C ends the block, unless the block has said so itself."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if not interrupt.args and (folder / GRID).exists():
            kept = any((folder / MEMBERS).glob(PARTS))
            words = "saved; continue with" if kept else "no network is finished; start again with"
            say("stopped", f"{words}: {again}")
            raise KeyboardInterrupt("announced") from None
        raise


def _compare(folder: Path, plan: Plan, settings: TrainConfig, dataset: Dataset, progress: bool, again: str) -> Sweep:
    """Train the networks of the grid that `folder` does not have yet. After Ctrl-C the result has the finished ones."""
    say("sweep", ", ".join(f"{name}: {len(values)} values" for name, values in plan.grid.items()))
    options = {name: value for name, value in options_of(settings, dataset).items() if name not in plan.grid}
    grid = plan.grid | {
        name: [weight_by_number(value, dataset) for value in plan.grid[name]] for name in plan.grid.keys() & {WEIGHT}
    }
    validation: dict[str, Any] = {} if "folds" in plan.own else {"validation": (dataset.test_x, dataset.test_y)}
    try:
        with fits_into_memory():
            return sweep(
                Maker(settings, dataset), dataset.x, dataset.y, grid=grid, checkpoint=folder / MEMBERS,
                progress=progress, **plan.own, **validation, **options,
            )  # fmt: skip
    except LostWorkerError as error:
        raise OnelaunchError(f"{LOST}; finished members are saved, continue with: {again}") from error


@dataclass(frozen=True)
class Maker:
    """Makes the network of a member. Its parameters are keys of the config."""

    settings: TrainConfig
    dataset: Dataset

    def __call__(
        self, seed: int, hidden: Any = None, layers: Any = None, activation: Any = None, dropout: Any = None,
        batch_norm: Any = None,
    ) -> nn.Module:  # fmt: skip
        given = {
            "hidden": hidden,
            "layers": layers,
            "activation": activation,
            "dropout": dropout,
            "batch_norm": batch_norm,
        }
        changed = {name: value for name, value in given.items() if value is not None}
        settings = replace(self.settings, seed=seed, **changed)
        if hidden is not None:
            settings = replace(settings, layers=None)
        model = build(settings, widths_of(settings, self.dataset))
        return model.to("cpu" if settings.engine == "cpu" else default_device())


def make_plan(from_file: dict[str, Any], own: dict[str, Any], flags: dict[str, Any]) -> Plan:
    """Tell lists of values from values, and check both. A flag replaces the file's key, and its list."""
    given = dict(from_file)
    found_own = {name: given.pop(name) for name in OWN if name in given} | own
    for name, value in found_own.items():
        if isinstance(value, bool) or not isinstance(value, OWN[name]):
            raise OnelaunchError(f"{name}={abbreviate(value)} has the wrong type: expected {OWN[name].__name__}")
    types = get_type_hints(TrainConfig)
    grid = {name: value for name, value in given.items() if name not in flags and is_grid(value, types.get(name))}
    for name, values in grid.items():
        if name in types and name not in Options.__dataclass_fields__ and name not in ARCHITECTURE:
            raise OnelaunchError(f"{name}={abbreviate(values)} cannot be a list: it is the same for all members")
        if not values:
            raise OnelaunchError(f"{name}=[] is empty: pass at least one value")
    base = {name: value for name, value in given.items() if name not in grid}
    checked: dict[str, list[Any]] = {name: [] for name in grid}
    settings = make_config({**base, **{name: values[0] for name, values in grid.items()}}, flags)
    for name, values in grid.items():
        others = {other: choices[0] for other, choices in grid.items() if other != name}
        for value in values:
            found = getattr(make_config({**base, **others, name: value}, flags), name)
            checked[name].append(tuple(found) if name == "betas" else found)
    if not checked:
        raise OnelaunchError("config has no list of values to try: write for example lr = [0.001, 0.01]")
    return Plan(settings, checked, found_own)


def _folder(out: str | None, config: Path) -> Path:
    """A new folder, or that of an earlier start of a sweep, which continues there."""
    if out is not None:
        earlier = Path(out).expanduser()
        if (earlier / MEMBERS).is_dir():
            return earlier
        if (earlier / GRID).is_file() and {path.name for path in earlier.iterdir()} <= {GRID, LOCK}:  # after a mistake
            (earlier / GRID).unlink()
    folder = RunFolder.create(out, config.stem)
    folder.close()
    return folder.path


def _report(folder: Path, result: Sweep) -> None:
    text = io.StringIO()
    rows = result.table.to_dicts()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    Console().print(result.table)  # first: a full disk must not lose it
    for index, reason in list(result.failures.items())[:3]:
        say("failed", f"{result.members[index]}: {reason}")
    _write(folder / TABLE, text.getvalue())
    if result.plan or not (folder / PAGE).exists():  # the page of a sweep that was finished before says how it ran
        result.plot(folder / FIGURE)
        result.html(folder / PAGE)
    say("table", str(folder / TABLE))
    say("page", str(folder / PAGE))


def _train_best(path: Path, plan: Plan, settings: TrainConfig, dataset: Dataset, result: Sweep, progress: bool) -> None:
    """Train the best candidate on all training rows into a run folder of its own, which `ol.load` and `predict` take."""
    row = result.best
    assert row.best_member is not None
    best = result.members[row.best_member]
    changed: dict[str, Any] = {
        name: list(value) if name == "betas" else value for name, value in row.parameters.items()
    }
    if "hidden" in changed:
        changed["layers"] = None
    if WEIGHT in changed:  # the run's config has the names of the classes
        numbers = [weight_by_number(value, dataset) for value in plan.grid[WEIGHT]]
        changed[WEIGHT] = plan.grid[WEIGHT][numbers.index(changed[WEIGHT])]
    # The rows held out stay those of the sweep, whatever the best seed is.
    settings = replace(settings, **{**changed, "seed": best.seed}, split_seed=settings.rows_seed, out=None)
    say("best", f"{best}, {result.table.heading} {result.table.format_value(row.mean)}; trained on all training rows:")
    if (path / CONFIG).exists():
        folder = RunFolder.open(path)
    else:
        folder = RunFolder.create(str(path), "best")
    try:
        model = build(settings, widths_of(settings, dataset))
        compared = 1 if "folds" in plan.own else len(result.members)
        resumes = folder.checkpoint.exists()
        train_into(folder, settings, dataset, model, progress, resumes=resumes, chosen_among=compared)
    finally:
        folder.close()


def _write(path: Path, content: str) -> None:
    try:
        write_atomic(path, content)
    except OSError as error:
        raise OnelaunchError(f"{str(path)!r} {unwritable_reason(error, 'pass another --out')}") from error
