"""`onelaunch compare`: the same run with PyTorch, torch.compile and our engines, side by side."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console

from onelaunch.bench.busy import BUSY, Watch, cores_taken_before, is_busy, remark, warning
from onelaunch.bench.compare import compare
from onelaunch.bench.results import note_cores_taken, provenance, save_results
from onelaunch.bench.sizes import time_sizes
from onelaunch.cli.config import TrainConfig, make_config, read_config
from onelaunch.cli.run_data import load_data
from onelaunch.cli.say import say
from onelaunch.cli.table import print_line, print_table
from onelaunch.cli.train import build, fits_into_memory, widths_of
from onelaunch.data import Dataset
from onelaunch.device import default_device
from onelaunch.engines import choose
from onelaunch.engines.contract import Run
from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic
from onelaunch.format import format_ratio
from onelaunch.report.comparison import agreement, comparison_table, noise, speed_up
from onelaunch.report.remarks import absences, is_red, remarks
from onelaunch.report.write import REPORT, write_report
from onelaunch.train.inputs import make_run
from onelaunch.train.interrupts import reraise_interrupts
from onelaunch.train.run_folder import COMPARE_FILE, CONFIG, RunFolder

MAX_SEEDS = 1000


def run_compare(config: Path | None, sizes: list[int] | None, seeds: int, flags: dict[str, Any]) -> None:
    settings = make_config(read_config(config) if config else {}, flags)
    for name in ("class_weight", "clip_norm", "metrics", "early_stopping"):
        if getattr(settings, name) not in (None, (), []):
            raise OnelaunchError(
                f"{name} is for train, not for compare, whose contenders do not all have it: leave it out"
            )
    hidden = sorted(set(sizes or []))
    if sizes is not None and not hidden:
        raise OnelaunchError("sizes=[] is empty: pass hidden sizes such as 128,256,512, or leave it out")
    if not 1 <= seeds <= MAX_SEEDS:
        raise OnelaunchError(f"seeds={seeds} must be 1 to {MAX_SEEDS}: pass how many to train")
    if settings.seed + seeds > 2**64:
        raise OnelaunchError(f"seed={settings.seed} and seeds={seeds} go beyond 64 bits: pass a smaller seed")
    if any(size < 1 for size in hidden):
        raise OnelaunchError(f"sizes={sizes} must be widths of 1 or more, such as 128,256,512")
    dataset, settings = load_data(settings)
    widths = widths_of(settings, dataset)
    if hidden and len(widths) < 3:
        raise OnelaunchError(
            f"sizes={hidden}: {'-'.join(map(str, widths))} has no hidden layer; pass --hidden, or leave it out"
        )
    if settings.engine != "auto":  # chosen by name: refuse at once if it cannot run, as `train` does
        choose(_make_run(settings, dataset, widths))
    _require_empty(settings.out)
    if busy := warning(cores_taken_before()):
        say("note", busy)
    results: dict[str, Any] = {
        **provenance(_command(config, flags, hidden, seeds)), "finished": False, "interrupted": False,
        "network": f"{'-'.join(map(str, widths))}, {settings.activation}, dropout {settings.dropout:g}",
        "data": dataset.source, "planned": {"sizes": hidden}, "contenders": {}, "absent": {}, "sizes": {},
    }  # fmt: skip
    folder = RunFolder.create(settings.out, f"compare-{Path(settings.data).stem}")
    try:
        # Before the config: `train --resume` takes a folder with a config and no comparison for a run.
        save_results(results, folder.path / COMPARE_FILE)
        write_atomic(folder.path / CONFIG, settings.to_toml())
        with fits_into_memory():
            _measure(folder.path, results, settings, dataset, widths, hidden, seeds)
    except (OnelaunchError, KeyboardInterrupt) as error:
        if not results["contenders"]:
            if isinstance(error, KeyboardInterrupt):
                say("stopped", "interrupted before the first contender had finished: nothing is kept")
                error.args = ("announced",)
            (folder.path / COMPARE_FILE).unlink(missing_ok=True)
            folder.discard()
        raise
    finally:
        folder.close()


def _require_empty(out: str | None) -> None:
    """Refuse a folder with files in it: a comparison cannot be resumed."""
    entries: list[Path] = []
    with contextlib.suppress(OSError, ValueError):  # creating the folder reports these
        entries = list(Path(out).expanduser().iterdir()) if out is not None else []
    if any(not entry.name.startswith(".") for entry in entries):
        raise OnelaunchError(f"out={out!r} is not empty: pass another folder")


def _measure(
    folder: Path, results: dict[str, Any], settings: TrainConfig, dataset: Dataset, widths: list[int],
    hidden: Sequence[int], seeds: int,
) -> None:  # fmt: skip
    def save() -> None:
        save_results(results, folder / COMPARE_FILE)

    def run_of(seed: int, inner: list[int] | None = None) -> Run:
        chosen = widths if inner is None else [widths[0], *inner, widths[-1]]
        return _make_run(replace(settings, seed=seed), dataset, chosen)

    say("model", results["network"])
    watch = Watch()
    try:
        with reraise_interrupts() as check_interrupts:

            def show(kind: str, line: str) -> None:
                say(kind, line)
                save()
                gc.collect()  # frees the last contender here, so that a Ctrl-C during its destructors is noticed below
                check_interrupts()

            every = range(settings.seed, settings.seed + seeds)
            compare(run_of, every, partial(show, "trained"), results, save)
            if hidden:
                depth = len(widths) - 2
                time_sizes(
                    hidden, lambda h: run_of(settings.seed, [h] * depth), partial(show, "size"), results["sizes"]
                )
    except KeyboardInterrupt:
        if not results["contenders"]:
            raise
        results["interrupted"] = True
    else:
        results["finished"] = True
    taken = note_cores_taken(results, watch)
    results["busy"] = is_busy(taken)
    save()
    _show(results)
    if results["busy"]:
        say("note", remark(taken))
    say("report", str(write_report([folder], folder / REPORT)))
    if results["interrupted"]:
        say("stopped", "interrupted: finished contenders are kept")
        raise KeyboardInterrupt("announced")
    if is_red(results):
        raise typer.Exit(1)


def _make_run(settings: TrainConfig, dataset: Dataset, widths: list[int]) -> Run:
    model = build(settings, widths)
    device = "cpu" if settings.engine == "cpu" else default_device()
    validation: tuple[np.ndarray[Any, Any] | None, ...] = (dataset.test_x, dataset.test_y)
    return make_run(model.to(device), dataset.x, dataset.y, validation, settings.fit_options())


def _show(results: dict[str, Any]) -> None:
    console = Console()
    if results["contenders"]:
        made = comparison_table(results["contenders"])
        head = [column.replace(" ", "\n") for column in made.head]  # so that 80 columns are enough for whole words
        print_table(console, made.caption, head, [[cell.replace(" ± ", "\n± ") for cell in row] for row in made.rows])
    for kind, words in [*agreement(results["contenders"]), *remarks(results)]:
        print_line(console, words, {"good": "", "note": "yellow"}.get(kind, "red"))
    for _, words in noise(results):
        print_line(console, words, "yellow")
    for words in absences(results):
        print_line(console, f"absent: {words}")
    if results["sizes"]:
        for name, by_size in speed_up(results["sizes"]).items():
            line = ", ".join(f"{size}: {format_ratio(ratio)}" for size, ratio in by_size.items())
            print_line(console, f"chosen engine against {name}, by hidden size: {BUSY if results['busy'] else line}")


def _command(config: Path | None, flags: dict[str, Any], sizes: Sequence[int], seeds: int) -> str:
    """The command that repeats this comparison, without the folder it is saved in."""
    words = ["onelaunch", "compare", *([str(config)] if config else [])]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif name != "out":
            words += [f"--{flag}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    words += ["--sizes", ",".join(map(str, sizes))] if sizes else []
    words += ["--seeds", str(seeds)] if seeds > 1 else []
    return shlex.join(words)
