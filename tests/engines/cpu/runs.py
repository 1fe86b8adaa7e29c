"""A plain PyTorch training loop over `onelaunch.rng` that shares no code with the engines, and short ways to run ours."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.engines.contract import Metrics, Run, State
from onelaunch.engines.cpu.session import CpuSession
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import dropout_keep, keep_scale, permutation
from onelaunch.run.spec import Spec
from onelaunch.train.inputs import make_run
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import make_optimizer


@dataclass
class Course:
    """The results of a run."""

    losses: torch.Tensor
    model: nn.Module
    correct: int
    validation: float | None
    accuracy: float | None = None


class Bystander:
    """A Monitor that records reports and requests a stop once `stop_at` steps are done (None: never)."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop = stop_at == 0
        self.stop_at = stop_at
        self.reports: list[tuple[int, float, int | None]] = []

    def report(self, step: int, loss: float, correct: int | None) -> None:
        self.reports.append((step, loss, correct))
        if self.stop_at is not None and step >= self.stop_at:
            self.stop = True


def _loss(spec: Spec, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if spec.loss == "cross_entropy":
        return F.cross_entropy(output, target, label_smoothing=spec.label_smoothing)
    target = target.to(output.dtype)
    return F.mse_loss(output, target) if spec.loss == "mse" else F.binary_cross_entropy_with_logits(output, target)


def _correct(spec: Spec, output: torch.Tensor, target: torch.Tensor) -> int:
    if spec.loss == "cross_entropy":
        return int((output.argmax(1) == target).sum())
    return int(((output > 0) == (target > 0.5)).sum()) if spec.loss == "bce_with_logits" else 0


def _optimizer(spec: Spec, model: nn.Module) -> torch.optim.Optimizer:
    names = ("optimizer", "lr", "weight_decay", *OPTIMIZERS[spec.optimizer].arguments)
    return make_optimizer(model, {name: getattr(spec, name) for name in names})


def train_plainly(run: Run, dtype: torch.dtype = torch.float64) -> Course:
    """The same run in plain PyTorch, on a copy of the model."""
    spec = run.spec
    model = copy.deepcopy(run.model).to(dtype)
    assert isinstance(model, nn.Sequential)
    optimizer = _optimizer(spec, model)

    def features(x: torch.Tensor) -> torch.Tensor:
        return (x.float() / 255 if x.dtype == torch.uint8 else x).to(dtype)

    losses: list[float] = []
    correct = 0
    for step in range(spec.total_steps):
        if step % spec.steps_per_epoch == 0:
            order = permutation(spec.rows, spec.seed, spec.epoch_of(step))
        rows = order[spec.batch_slice(step)]
        model.train()
        h, dropouts = features(run.x[rows]), 0
        for module in model:
            if isinstance(module, nn.Dropout):
                keep = dropout_keep(module.p, spec.seed, dropouts, step, len(h), h[0].numel()).view(h.shape)
                h = h * keep * keep_scale(module.p)
                dropouts += 1
            else:
                h = module(h)
        loss = _loss(spec, h, run.y[rows])
        for group in optimizer.param_groups:
            group["lr"] = spec.lr_at(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        correct += _correct(spec, h, run.y[rows])
    validation = accuracy = None
    if run.validation:
        model.eval()
        total, correct_rows, rows_each = 0.0, 0, max(256, spec.batch_size)
        with torch.no_grad():
            for x, y in zip(*(part.split(rows_each) for part in run.validation), strict=True):
                output = model(features(x))
                total += _loss(spec, output, y).item() * len(x)
                correct_rows += _correct(spec, output, y)
        validation = total / len(run.validation[0])
        per_row = run.outputs if spec.loss == "bce_with_logits" else 1
        accuracy = correct_rows / len(run.validation[0]) / per_row
    return Course(torch.tensor(losses, dtype=torch.float64), model, correct, validation, accuracy)


def copy_of(run: Run) -> Run:
    """The run with its own copy of the model."""
    return dataclasses.replace(run, model=copy.deepcopy(run.model))


def train_natively(
    run: Run, cache_folder: Path, *, state: State | None = None, first_step: int = 0, **options: Any
) -> Course:
    """The run on the CPU engine, on a copy of the model."""
    own = copy_of(run)
    session = CpuSession(own, state or {}, cache_folder=cache_folder, **options)
    try:
        segments = list(session.segments(first_step, Bystander()))
        session.snapshot()
    finally:
        session.close()
    metrics: Metrics | None = segments[-1].validation
    return Course(
        torch.cat([segment.losses for segment in segments]).double(), own.model,
        sum(segment.correct or 0 for segment in segments), metrics.loss if metrics else None,
        metrics.accuracy if metrics else None,
    )  # fmt: skip


def data(loss: str, rows: int, inputs: int, outputs: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose targets can be learned only in part: a loss near zero has no relative accuracy in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    hidden = torch.tanh(x @ torch.randn(inputs, outputs, generator=generator))
    hidden += torch.randn(rows, outputs, generator=generator)
    if loss == "cross_entropy":
        return x, hidden.argmax(1)
    return x, hidden if loss == "mse" else (hidden > 0).float()


def make(model: nn.Module, x: torch.Tensor, y: torch.Tensor, validation: Any = None, **options: Any) -> Run:
    return make_run(model, x, y, validation, {"optimizer": "sgd", "lr": 0.05, "batch_size": 16, **options})


def assert_close(
    got: Course, expected: Course, *, losses: float = LOSS_TOLERANCE, weights: float = WEIGHT_TOLERANCE
) -> None:
    """Losses relative (to at least 1e-3: a loss near zero has no relative accuracy in any arithmetic), weights absolute."""
    gap = ((got.losses - expected.losses).abs() / expected.losses.abs().clamp_min(1e-3)).max().item()
    assert gap <= losses, f"losses differ by {gap:.2e}"
    for (name, ours), theirs in zip(got.model.state_dict().items(), expected.model.state_dict().values(), strict=True):
        gap = (ours.double() - theirs.double()).abs().max().item()
        assert gap <= weights, f"{name} differs by {gap:.2e}"
    if expected.validation is not None and got.validation is not None:
        assert abs(got.validation - expected.validation) <= losses * max(1e-3, abs(expected.validation))


def assert_same_bits(a: Course, b: Course) -> None:
    assert torch.equal(a.losses, b.losses)
    for name, tensor in a.model.state_dict().items():
        assert torch.equal(tensor, b.model.state_dict()[name]), name
    assert (a.correct, a.validation) == (b.correct, b.validation)
