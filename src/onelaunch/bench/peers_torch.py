"""A training run in plain PyTorch, as fast as PyTorch makes it: eager, compiled, and the whole step as a CUDA graph.

Data lie on the device and batches are gathered there. Products are in the run's precision (autocast for bf16), masters in fp32.
`reference_losses` is the same run in float64, which checks compare with.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onelaunch.bench.contenders import AUTOCAST, make_optimizer
from onelaunch.capture import capturing
from onelaunch.engines.contract import Run
from onelaunch.rng import permutation
from onelaunch.run.objective import as_features, loss_of

Steps = Callable[[int], object]  # train so many steps further
WARM_UP = 3  # steps on a side stream before a capture, as PyTorch asks for


def row_order(run: Run, steps: int) -> torch.Tensor:
    """The rows of the first steps, one line each: those of `fit`, but for an epoch's incomplete last batch, left out here."""
    spec = run.spec
    whole = spec.rows // spec.batch_size
    epochs = [permutation(spec.rows, spec.seed, epoch, device=run.device) for epoch in range(-(-steps // whole))]
    lines = [order[: whole * spec.batch_size].view(whole, spec.batch_size) for order in epochs]
    return torch.cat(lines)[:steps]


def reference_losses(run: Run, steps: int) -> torch.Tensor:
    """The loss of each step in float64, by the loop that `fit` replaces."""
    model = copy.deepcopy(run.model).double()
    optimizer = make_optimizer(run, model)
    y = run.y.double() if run.y.is_floating_point() else run.y
    losses = []
    for rows in row_order(run, steps):
        optimizer.zero_grad()
        loss = loss_of(run.spec, model(as_features(run.x[rows], torch.float64)), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def worst_relative(losses: list[float], reference: torch.Tensor) -> float:
    """The largest relative difference of a step's loss; infinite where one is not a number, or missing."""
    if len(losses) != len(reference):
        return float("inf")
    gap = (torch.tensor(losses, dtype=torch.float64) - reference).abs() / reference.abs()
    return float(gap.nan_to_num(nan=float("inf")).max())


class TorchStep:
    """One step of the run on given rows. `mode`: of torch.compile; None for a model as it is."""

    def __init__(self, run: Run, mode: str | None = None) -> None:
        self.run, self.model = run, copy.deepcopy(run.model)
        self.loss = self.plain_loss if mode is None else torch.compile(self.plain_loss, mode=mode, dynamic=False)
        self.optimizer = _optimizer(run, self.model)

    def plain_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        dtype = AUTOCAST.get(self.run.spec.precision)
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype is not None):
            output = self.model(as_features(x, torch.float32))
        return loss_of(self.run.spec, output.float(), y)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.run.x[rows], self.run.y[rows])
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    spec, fused = run.spec, run.device.type == "cuda"
    assert spec.schedule == "constant"
    assert not spec.momentum
    if spec.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=spec.lr, fused=fused)
    assert spec.optimizer == "adam"
    return torch.optim.Adam(
        model.parameters(), lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=fused, capturable=fused
    )


def loop(run: Run, mode: str | None = None) -> Steps:
    """A call from Python a step, compiled with `mode` or as it is."""
    step = TorchStep(run, mode)
    order = row_order(run, run.spec.rows // run.spec.batch_size)

    def steps(count: int) -> None:
        with _products_of(run):
            for index in range(count):
                step(order[index % len(order)])

    return steps


class Captured:
    """The whole step, gather and update included, as one CUDA graph; a counter on the device chooses the rows.

    Called with a number of steps; then it validates, if the run does.
    """

    def __init__(self, run: Run, mode: str | None = None) -> None:
        self.run, self.step = run, TorchStep(run, mode)
        self.order = row_order(run, run.spec.rows // run.spec.batch_size)
        self.position = torch.zeros(1, dtype=torch.int64, device=run.device)
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with _products_of(run):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._whole_step()
            torch.cuda.current_stream().wait_stream(stream)
            with capturing(self.graph, stream=stream):
                self._whole_step()

    def _whole_step(self) -> None:
        self.step(self.order.index_select(0, self.position)[0])
        self.position.add_(1).remainder_(len(self.order))

    def __call__(self, count: int) -> None:
        for _ in range(count):
            self.graph.replay()
        if self.run.validation is not None:
            with torch.no_grad():
                self.step.plain_loss(*self.run.validation).item()


def seconds_of(steps: Steps, count: int, units: int) -> Callable[[], float]:
    """A call takes `count` steps and tells the seconds of one of the `units` they make up, the device's work included."""

    def work() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        steps(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / units

    return work


@contextmanager
def _products_of(run: Run) -> Iterator[None]:
    """fp32 products as the run asks for them: exact for "fp32", else tf32, which "auto" may take."""
    before: Any = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if run.spec.precision == "fp32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
