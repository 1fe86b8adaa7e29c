"""One training run by every contender on this machine: times, memory, loss curves, and whether the curves agree."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.bench.agreement import widest_gap
from onelaunch.bench.contenders import EAGER, Contender, OurEngine, Trained, contenders_for, peak_memory, shortened
from onelaunch.bench.measure import one_line_reason
from onelaunch.bench.memory_timeline import engine_timeline, step_timeline
from onelaunch.engines.contract import Run
from onelaunch.engines.cpu import ENGINE as CPU
from onelaunch.errors import DivergedError
from onelaunch.format import format_percent, format_seconds
from onelaunch.integers import ceil_div
from onelaunch.run.objective import as_features, count_correct, has_accuracy, loss_of, predictions_per_row

OURS_EAGER = "onelaunch eager"
CURVE_POINTS = 80
START_STEPS = 2
EVALUATION_ROWS = 1024
Show = Callable[[str], None]


@dataclass
class Record:
    """What one contender did, one entry per seed."""

    startup_seconds: float
    short_seconds: float  # of a warmed-up run of START_STEPS: mostly the one-time cost of any run
    peak_bytes: int | None = None
    losses: list[list[float]] = field(default_factory=list)
    epochs: list[list[tuple[int, float]]] = field(default_factory=list)
    final: list[dict[str, float | None]] = field(default_factory=list)


def compare(
    run_of: Callable[[int], Run], seeds: Sequence[int], show: Show, results: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill `results` contender by contender, so that an interruption keeps what is done. `run_of(seed)` makes the run."""
    first = run_of(seeds[0])
    contenders, absent = contenders_for(first)
    spec = first.spec
    names = [contender.name for contender in contenders]
    results.setdefault("planned", {}).update({"contenders": names, "seeds": list(seeds)})
    results.update(
        {"rows": spec.rows, "batch_size": spec.batch_size, "steps": spec.total_steps, "seeds": [], "trained": [],
         "steps_per_epoch": spec.steps_per_epoch, "parameters": sum(p.numel() for p in first.model.parameters()),
         "contenders": {}, "absent": absent, "failed": {}, "diverged": {}, "memory": _step_memory(first, names)}
    )  # fmt: skip
    records: dict[str, Record] = {}
    for seed in seeds:
        run = first if seed == seeds[0] else run_of(seed)
        for contender in contenders:
            if contender.name in absent or contender.name in results["failed"]:
                continue
            line = ""
            try:
                trained = _train(contender, run, records)
            except (Exception, SystemExit) as error:  # a peer may raise anything; the others go on
                _note_failure(contender, seed, error, results)
                records.pop(contender.name, None)
            else:
                results["trained"].append([contender.name, seed])
                if trained.planned_bytes is not None:
                    results["memory"][contender.name] = {"flat": trained.planned_bytes}
                line = _line(contender.name, seed, trained, records[contender.name])
            results["contenders"] = _summaries(records, spec.steps_per_epoch)
            save()
            if line:  # last: an interruption here loses no result
                show(line)
        results["seeds"].append(seed)


def _note_failure(contender: Contender, seed: int, error: BaseException, results: dict[str, Any]) -> None:
    """A peer that raises is absent; an engine of ours has accepted the run, so that it has failed."""
    name = contender.name
    where = f", seed {seed}" if results["seeds"] else ""  # a later seed: the earlier ones went well
    results["memory"].pop(name, None)
    results["trained"] = [entry for entry in results["trained"] if entry[0] != name]
    if not isinstance(contender, OurEngine):
        results["absent"][name] = f"{one_line_reason(error)}{where}"
    elif isinstance(error, DivergedError):
        results["diverged"][name] = error.step + 1  # shown steps count from 1
        results["failed"][name] = f"diverged at step {error.step + 1:,}{where}"
    else:
        results["failed"][name] = f"{one_line_reason(error)}{where}"


def _train(contender: Contender, run: Run, records: dict[str, Record]) -> Trained:
    """Train, and add the result to the contender's record."""
    name = contender.name
    with peak_memory(run.device) as peak:
        if name not in records:
            begin = time.perf_counter()
            contender.train(shortened(run, START_STEPS))
            startup = time.perf_counter() - begin
            again = contender.train(shortened(run, START_STEPS))
            records[name] = Record(startup, sum(taken for _, taken in again.epochs))
        trained = contender.train(run)
    record = records[name]
    record.peak_bytes = max((value for value in (record.peak_bytes, peak.bytes) if value is not None), default=None)
    record.losses.append(trained.losses)
    record.epochs.append(trained.epochs)
    record.final.append(evaluate(trained.model, run))
    return trained


def evaluate(model: nn.Module, run: Run) -> dict[str, float | None]:
    """Loss and accuracy on the validation rows (else the training rows), by the same code for every contender."""
    x, y = run.validation if run.validation is not None else (run.x, run.y)
    total, correct = 0.0, 0
    model.eval()
    with torch.no_grad():
        for first in range(0, len(x), EVALUATION_ROWS):
            part = slice(first, first + EVALUATION_ROWS)
            output = model(as_features(x[part], torch.float32)).float()
            total += loss_of(run.spec, output, y[part]).item() * len(output)
            correct += int(found) if (found := count_correct(run.spec, output, y[part])) is not None else 0
    predictions = len(x) * predictions_per_row(run.spec, run.outputs)
    return {"loss": total / len(x), "accuracy": correct / predictions if has_accuracy(run.spec) else None}


def _summaries(records: dict[str, Record], steps_per_epoch: int) -> dict[str, Any]:
    reference = EAGER if EAGER in records else next(iter(records), "")
    found = {}
    for name, record in records.items():
        epochs = [epoch for run in record.epochs for epoch in run]
        found[name] = {
            "step_seconds": spread([taken / steps for steps, taken in epochs]),
            "epoch_seconds": spread([taken for steps, taken in epochs if steps == steps_per_epoch]),
            "startup_seconds": record.startup_seconds,
            "once_share": _once_share(record),
            "peak_bytes": record.peak_bytes,
            "final": {
                key: spread([final[key] for final in record.final if final[key] is not None])
                for key in ("loss", "accuracy")
            },
            "curve": _curve(record.losses),
            "diverged_step": _diverged_step(record),
            "gap": None if name == reference else _gap(records[reference], record),
        }
    return found


def _once_share(record: Record) -> float | None:
    """The share of one-time cost in the median epoch's time; None where the runs are too short to tell it from steps.

    The one-time cost falls into a run's first epoch: with three epochs or more it is not in their median.
    """
    if len(record.epochs[0]) > 2:
        return 0.0
    steps = sum(count for count, _ in record.epochs[0])
    total = statistics.median(sum(taken for _, taken in run) for run in record.epochs)
    if steps <= START_STEPS or total <= record.short_seconds:
        return None
    step = (total - record.short_seconds) / (steps - START_STEPS)
    return max(0.0, record.short_seconds - START_STEPS * step) / total


def _diverged_step(record: Record) -> int | None:
    """The first step, counted from 1, whose loss is not finite in some seed."""
    found = [step for losses in record.losses for step, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    return min(found, default=None)


def spread(values: Sequence[Any]) -> dict[str, float] | None:
    """Median, mean, standard deviation and range; None for no values."""
    if not values:
        return None
    return {
        "median": statistics.median(values), "mean": statistics.fmean(values), "minimum": min(values),
        "maximum": max(values), "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0, "n": len(values),
    }  # fmt: skip


def _gap(reference: Record, other: Record) -> dict[str, Any] | None:
    """The gap of the mean curves over the seeds that both have finished; None where one of the two has diverged."""
    if any(_diverged_step(record) is not None for record in (reference, other)):
        return None
    count = min(len(reference.losses), len(other.losses))
    curves = (np.mean(record.losses[:count], axis=0) for record in (reference, other))
    return asdict(widest_gap(*curves))


def _curve(losses: list[list[float]]) -> dict[str, list[float]]:
    """Means over stretches of steps: the last step of each, the mean over the seeds, the smallest and the largest seed."""
    array = np.asarray(losses)
    length = ceil_div(array.shape[1], CURVE_POINTS)
    edges = list(range(0, array.shape[1], length))
    means = np.stack([array[:, edge : edge + length].mean(axis=1) for edge in edges], axis=1)
    return {
        "steps": [min(edge + length, array.shape[1]) for edge in edges],
        "mean": means.mean(axis=0).tolist(), "low": means.min(axis=0).tolist(), "high": means.max(axis=0).tolist(),
    }  # fmt: skip


def _step_memory(run: Run, names: Sequence[str]) -> dict[str, Any]:
    """Live bytes after each operation of the PyTorch step; for the CPU engine its arena, which holds the whole step.

    Only contenders that are compared are listed. One that fails here will say so when it trains.
    """
    found: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        found[EAGER] = step_timeline(run)
    if OURS_EAGER in names and run.device.type == "cpu":
        with contextlib.suppress(Exception):
            found[OURS_EAGER] = engine_timeline(run)
    if "onelaunch cpu" in names:
        session = CPU.start(run, {})
        found["onelaunch cpu"] = {"flat": session.arena.memory.nbytes}
        session.close()
    return found


def _line(name: str, seed: int, trained: Trained, record: Record) -> str:
    step = statistics.median(taken / steps for steps, taken in trained.epochs)
    accuracy = record.final[-1]["accuracy"]
    end = "" if accuracy is None else f", accuracy {format_percent(accuracy, 2)}"
    return f"{name}, seed {seed}: {format_seconds(step)} per step, loss {record.final[-1]['loss']:.4g}{end}"
