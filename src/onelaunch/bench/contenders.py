"""Those who train the same run: the loop a user writes in PyTorch, as it is and compiled, and our engines."""

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

from onelaunch.engines import FASTEST_FIRST, engine_or_reason
from onelaunch.engines.contract import Run
from onelaunch.rng import permutation
from onelaunch.run.objective import as_features, loss_of
from onelaunch.run.spec import Spec
from onelaunch.train.fit import fit_with

EAGER, COMPILED = "torch eager", "torch.compile"
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Trained:
    """What a contender did with a run; `epochs` holds (steps, seconds) each, `planned_bytes` the arena of an engine that has
    one and tells."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    epochs: list[tuple[int, float]] = field(default_factory=list)
    planned_bytes: int | None = None


class Contender(Protocol):
    name: str

    def train(self, run: Run) -> Trained:
        """Train a copy of the run's model; what is done once (compiling, say) is done for the first run only."""


class TorchLoop:
    """The training loop of a PyTorch user: data on the device, nothing read back but at the end of an epoch."""

    def __init__(self, run: Run, *, compiled: bool) -> None:
        self.name = COMPILED if compiled else EAGER
        self.model = copy.deepcopy(run.model)
        self.precision = run.spec.precision
        if self.precision == "auto" and run.device.type == "cuda":
            self.precision = "tf32"  # our engines may take it too
        self._loss = torch.compile(self._plain_loss, dynamic=False) if compiled else self._plain_loss
        self._ready = not compiled

    def _plain_loss(self, spec: Spec, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtype = AUTOCAST.get(self.precision)
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            output = self.model(as_features(x, torch.float32))
        return loss_of(spec, output.float(), y)

    def _make_ready(self, run: Run) -> None:
        """Compile for the smaller last batch too, which would else happen in the middle of the first epoch."""
        rest = run.spec.rows % run.spec.batch_size
        if not self._ready and rest and not run.spec.drop_last:
            self._loss(run.spec, run.x[:rest], run.y[:rest]).backward()
        self._ready = True

    def train(self, run: Run) -> Trained:
        spec, device = run.spec, run.device
        self._make_ready(run)
        self.model.load_state_dict(run.model.state_dict())
        self.model.train()
        torch.manual_seed(spec.seed)  # of the dropout masks, which are PyTorch's own here
        optimizer = make_optimizer(run, self.model)
        scaler = torch.amp.GradScaler(device.type, enabled=self.precision == "fp16")
        result, step = Trained(self.model), 0
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        try:
            while step < spec.total_steps:
                first, last, begin = step, spec.epoch_end(step), time.perf_counter()
                order = permutation(spec.rows, spec.seed, spec.epoch_of(step), device=device)
                losses = torch.empty(last - first, device=device)
                for step in range(first, last):
                    for group in optimizer.param_groups:
                        group["lr"] = spec.lr_at(step)
                    losses[step - first] = self.step(run, order[spec.batch_slice(step)], optimizer, scaler)
                step = last
                result.losses += losses.tolist()  # waits for the device
                result.epochs.append((last - first, time.perf_counter() - begin))
        finally:
            torch.set_float32_matmul_precision(before)
        return result

    def step(
        self, run: Run, rows: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
    ) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = self._loss(run.spec, run.x[rows], run.y[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()


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


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    spec, parameters = run.spec, [p for p in model.parameters() if p.requires_grad]
    if spec.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
        )
    kind = torch.optim.Adam if spec.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)


def contenders_for(run: Run) -> tuple[list[Contender], dict[str, str]]:
    """All that can train `run` here, and why the others cannot."""
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
    bytes: int | None = None  # None where this system does not say


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The most memory held inside the block beyond what was held before: of PyTorch's CUDA pool, or of this process."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    try:
        with suppress(AttributeError):  # glibc's: what was freed leaves the process, and is seen when it is taken again
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far
        held = _resident("VmRSS")
    except OSError:
        yield peak
        return
    yield peak
    # What the process gave back before is not seen: nothing more held is not 0 bytes.
    peak.bytes = max(0, _resident("VmHWM") - held) or None


def _resident(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {what}")
