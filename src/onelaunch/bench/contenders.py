"""Contenders that train a whole run: the loop that a PyTorch user writes, uncompiled and compiled, and our engines."""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from onelaunch.bench.torch_step import TorchStep, matmul_precision
from onelaunch.engines import FASTEST_FIRST, engine_or_reason
from onelaunch.engines.contract import Run
from onelaunch.rng import permutation
from onelaunch.train.fit import fit_with

EAGER, COMPILED = "torch eager", "torch.compile"


@dataclass
class Trained:
    """What a contender made of a run."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)  # one per step
    epochs: list[tuple[int, float]] = field(default_factory=list)  # (steps, seconds) of each
    planned_bytes: int | None = None  # the arena of an engine that plans one and says so


class Contender(Protocol):
    name: str

    def train(self, run: Run) -> Trained:
        """Train a copy of the run's model. One-time work, such as compiling, is done for the first run only."""


class TorchLoop:
    """The training loop of a PyTorch user: data on the device, losses read back at the end of each epoch only."""

    def __init__(self, run: Run, *, compiled: bool) -> None:
        self.name = COMPILED if compiled else EAGER
        self._step = TorchStep(run, "default" if compiled else None)
        self._ready = not compiled

    def _make_ready(self, run: Run) -> None:
        """Compile for the smaller last batch too: otherwise that happens in the middle of the first epoch."""
        rest = run.spec.rows % run.spec.batch_size
        if not self._ready and rest and not run.spec.drop_last:
            self._step.loss(run.x[:rest], run.y[:rest]).backward()
        self._ready = True

    def train(self, run: Run) -> Trained:
        spec, device, train_step = run.spec, run.device, self._step
        self._make_ready(run)
        train_step.begin(run)
        torch.manual_seed(spec.seed)  # for the dropout masks, which are PyTorch's own here
        result, step = Trained(train_step.model), 0
        with matmul_precision(run):
            while step < spec.total_steps:
                first, last, begin = step, spec.epoch_end(step), time.perf_counter()
                order = permutation(spec.rows, spec.seed, spec.epoch_of(step), device=device)
                losses = torch.empty(last - first, device=device)
                for step in range(first, last):
                    for group in train_step.optimizer.param_groups:
                        group["lr"] = spec.lr_at(step)
                    rows = order[spec.batch_slice(step)]
                    losses[step - first] = train_step(run.x[rows], run.y[rows])
                step = last
                result.losses += losses.tolist()  # waits for the device
                result.epochs.append((last - first, time.perf_counter() - begin))
        return result


class OurEngine:
    def __init__(self, engine: str) -> None:
        self.engine, self.name = engine, f"onelaunch {engine}"

    def train(self, run: Run) -> Trained:
        model = copy.deepcopy(run.model)
        options = {**run.spec.to_dict(), "betas": run.spec.betas, "engine": self.engine}
        del options["rows"]
        history = fit_with(model, run.x, run.y, options, progress=False)
        ends = [0, *(epoch["step"] for epoch in history.epochs)]
        epochs = [
            (end - begin, epoch["seconds"])
            for begin, end, epoch in zip(ends[:-1], ends[1:], history.epochs, strict=True)
        ]
        return Trained(model, history.losses, epochs, history.allocations.get("peak bytes"))


def contenders_for(run: Run) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can train `run` on this machine, and the reason of each that cannot, by name."""
    found: list[Contender] = [TorchLoop(run, compiled=False), TorchLoop(run, compiled=True)]
    absent = {}
    ours = FASTEST_FIRST if run.spec.engine == "auto" else (run.spec.engine,)
    for name in reversed(ours):  # slowest first, as the peers before them
        engine = engine_or_reason(name, run.device)
        reason = engine if isinstance(engine, str) else engine.unsupported_reason(run)
        if reason:
            absent[f"onelaunch {name}"] = reason
        else:
            found.append(OurEngine(name))
    return found, absent


def shortened(run: Run, steps: int) -> Run:
    return replace(run, spec=replace(run.spec, epochs=None, steps=steps))


class Peak:
    bytes: int | None = None  # None where the system does not say


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The peak of memory inside the block beyond what was held before it: of PyTorch's CUDA pool, or of this process."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        with suppress(AttributeError):  # glibc's: freed memory leaves the process, so that taking it again is seen
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
        held = _status_bytes("VmRSS")
    except OSError:
        yield peak
        return
    yield peak
    # Memory that the process gave back before the block hides as much inside it: a difference of 0 is unknown, not 0.
    peak.bytes = max(0, _status_bytes("VmHWM") - held) or None


def _status_bytes(field_name: str) -> int:
    """A field of this process's status file, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field_name}")
