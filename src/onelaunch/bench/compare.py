"""The same run trained by everybody on this machine: times, memory, loss curves, and whether the curves agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.bench.agreement import widest_gap
from onelaunch.bench.contenders import EAGER, Contender, contenders_for, peak_memory, shortened
from onelaunch.bench.memory_timeline import step_timeline
from onelaunch.fuse.quantities import duration
from onelaunch.train.engines.contract import Run
from onelaunch.train.engines.cpu import ENGINE as CPU
from onelaunch.train.objective import as_features, count_correct, loss_of, predictions_per_row

CURVE_POINTS = 80
START_STEPS = 2
EVALUATION_ROWS = 1024
Show = Callable[[str], None]


@dataclass
class Record:
    """What one contender did, seed by seed."""

    startup_seconds: float
    peak_bytes: int | None = None
    losses: list[list[float]] = field(default_factory=list)
    epochs: list[tuple[int, float]] = field(default_factory=list)
    final: list[dict[str, float | None]] = field(default_factory=list)


def compare(
    run_of: Callable[[int], Run], seeds: Sequence[int], show: Show, results: dict[str, Any], save: Callable[[], None]
) -> None:
    """Fill `results` contender by contender; an interruption keeps what is done. `run_of(seed)` makes the run of a seed."""
    first = run_of(seeds[0])
    contenders, absent = contenders_for(first)
    spec = first.spec
    results.update(
        {"rows": spec.rows, "batch_size": spec.batch_size, "steps": spec.total_steps, "seeds": [],
         "steps_per_epoch": spec.steps_per_epoch, "parameters": sum(p.numel() for p in first.model.parameters()),
         "contenders": {}, "absent": absent, "memory": _memory_over_a_step(first, absent)}
    )  # fmt: skip
    records: dict[str, Record] = {}
    for seed in seeds:
        run = first if seed == seeds[0] else run_of(seed)
        for contender in contenders:
            if contender.name in absent:
                continue
            try:
                planned = _train(contender, run, records)
            except Exception as error:  # a peer may raise anything; the others go on
                absent[contender.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                records.pop(contender.name, None)
                continue
            if planned is not None:
                results["memory"][contender.name] = {"flat": planned}
            show(_line(contender.name, seed, records[contender.name]))
            results["contenders"] = _summaries(records, spec.steps_per_epoch)
            save()
        results["seeds"].append(seed)


def _train(contender: Contender, run: Run, records: dict[str, Record]) -> int | None:
    """Add to the contender's record; returns the bytes of its arena, where it tells."""
    name = contender.name
    with peak_memory(run.device) as peak:
        if name not in records:
            begin = time.perf_counter()
            contender.train(shortened(run, START_STEPS))
            records[name] = Record(time.perf_counter() - begin)
        trained = contender.train(run)
    record = records[name]
    record.peak_bytes = max((value for value in (record.peak_bytes, peak.bytes) if value is not None), default=None)
    record.losses.append(trained.losses)
    record.epochs += trained.epochs
    record.final.append(evaluate(trained.model, run))
    return trained.planned_bytes


def evaluate(model: nn.Module, run: Run) -> dict[str, float | None]:
    """Loss and accuracy of trained weights on the validation rows (else the training rows), by the same code for everybody."""
    x, y = run.validation if run.validation is not None else (run.x, run.y)
    total, right = 0.0, 0
    model.eval()
    with torch.no_grad():
        for first in range(0, len(x), EVALUATION_ROWS):
            part = slice(first, first + EVALUATION_ROWS)
            output = model(as_features(x[part], torch.float32)).float()
            total += loss_of(run.spec, output, y[part]).item() * len(output)
            correct = count_correct(run.spec, output, y[part])
            right += 0 if correct is None else int(correct)
    predictions = len(x) * predictions_per_row(run.spec, run.outputs)
    return {"loss": total / len(x), "accuracy": None if run.spec.loss == "mse" else right / predictions}


def _summaries(records: dict[str, Record], steps_per_epoch: int) -> dict[str, Any]:
    reference = EAGER if EAGER in records else next(iter(records))
    return {
        name: {
            "step_seconds": spread([seconds / steps for steps, seconds in record.epochs]),
            "epoch_seconds": spread([seconds for steps, seconds in record.epochs if steps == steps_per_epoch]),
            "startup_seconds": record.startup_seconds,
            "peak_bytes": record.peak_bytes,
            "final": {
                key: spread([final[key] for final in record.final if final[key] is not None])
                for key in ("loss", "accuracy")
            },
            "curve": _curve(record.losses),
            "gap": None if name == reference else _gap(records[reference], record),
        }
        for name, record in records.items()
    }


def spread(values: Sequence[Any]) -> dict[str, float] | None:
    """Median, mean, deviation and range of some values; None for no values."""
    if not values:
        return None
    return {
        "median": statistics.median(values), "mean": statistics.fmean(values), "minimum": min(values),
        "maximum": max(values), "deviation": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0, "n": len(values),
    }  # fmt: skip


def _gap(reference: Record, other: Record) -> dict[str, Any]:
    """Of the mean curves over the seeds both have finished."""
    count = min(len(reference.losses), len(other.losses))
    curves = (np.mean(record.losses[:count], axis=0) for record in (reference, other))
    return widest_gap(*curves).to_dict()


def _curve(losses: list[list[float]]) -> dict[str, list[float]]:
    """Means over stretches of steps: their last steps, the mean over the seeds, the least and the largest seed."""
    array = np.asarray(losses)
    length = -(-array.shape[1] // CURVE_POINTS)
    edges = list(range(0, array.shape[1], length))
    means = np.stack([array[:, edge : edge + length].mean(axis=1) for edge in edges], axis=1)
    return {
        "steps": [min(edge + length, array.shape[1]) for edge in edges],
        "mean": means.mean(axis=0).tolist(), "low": means.min(axis=0).tolist(), "high": means.max(axis=0).tolist(),
    }  # fmt: skip


def _memory_over_a_step(run: Run, absent: dict[str, str]) -> dict[str, Any]:
    """PyTorch's live bytes after each operation; for the CPU engine its arena, which a step never leaves."""
    found: dict[str, Any] = {EAGER: step_timeline(run)}
    if run.device.type == "cpu" and "onelaunch cpu" not in absent:
        session = CPU.start(run, {})
        found["onelaunch cpu"] = {"flat": session.arena.memory.nbytes}
        session.close()
    return found


def _line(name: str, seed: int, record: Record) -> str:
    steps, seconds = (sum(column) for column in zip(*record.epochs, strict=True))
    accuracy = record.final[-1]["accuracy"]
    right = "" if accuracy is None else f", accuracy {accuracy:.2%}".replace("%", " %")
    return f"{name}, seed {seed}: {duration(seconds / steps)} a step, loss {record.final[-1]['loss']:.4g}{right}"
