"""Training steps in plain PyTorch, as fast as PyTorch makes them: eager, compiled, and the whole step as a CUDA graph.

The data stay on the device and batches are gathered there. Products are in the run's precision (autocast for bf16), master
weights in fp32. `reference_losses` trains the same run in float64, for checks to compare with.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from onelaunch.bench.torch_step import TorchStep, matmul_precision
from onelaunch.capture.graph import capturing
from onelaunch.engines.contract import Run
from onelaunch.integers import ceil_div
from onelaunch.rng import permutation

Steps = Callable[[int], object]  # train that many further steps
WARM_UP = 3  # steps on a side stream before a capture, as PyTorch asks for


def row_order(run: Run, steps: int) -> torch.Tensor:
    """Row indices of the first steps, shape [steps, batch]: those of `fit`, without the incomplete last batch of an epoch."""
    spec = run.spec
    assert spec.schedule == "constant", "the peers set no learning rate per step"
    whole = spec.rows // spec.batch_size
    epochs = [permutation(spec.rows, spec.seed, epoch, device=run.device) for epoch in range(ceil_div(steps, whole))]
    lines = [order[: whole * spec.batch_size].view(whole, spec.batch_size) for order in epochs]
    return torch.cat(lines)[:steps]


def reference_losses(run: Run, steps: int) -> torch.Tensor:
    """The loss of each step in float64, on the CPU, by the loop that `fit` replaces."""
    step = TorchStep(run, dtype=torch.float64)
    y = run.y.double() if run.y.is_floating_point() else run.y
    return torch.stack([step(run.x[rows], y[rows]) for rows in row_order(run, steps)]).cpu()


def worst_relative(losses: list[float], reference: torch.Tensor) -> float:
    """The largest relative difference of a step's loss; infinite where a loss is NaN or missing."""
    if len(losses) != len(reference):
        return float("inf")
    gap = (torch.tensor(losses, dtype=torch.float64) - reference).abs() / reference.abs()
    return float(gap.nan_to_num(nan=float("inf")).max())


def loop(run: Run, mode: str | None = None) -> Steps:
    """One call from Python per step, compiled with `mode` or, for None, as written."""
    step = TorchStep(run, mode)
    order = row_order(run, run.spec.rows // run.spec.batch_size)

    def steps(count: int) -> None:
        with matmul_precision(run):
            for index in range(count):
                rows = order[index % len(order)]
                step(run.x[rows], run.y[rows])

    return steps


class Captured:
    """The whole step, gather and update included, as one CUDA graph; a counter on the device chooses the rows.

    A call takes a number of steps, then validates if the run has validation data.
    """

    def __init__(self, run: Run, mode: str | None = None) -> None:
        self.run, self.step = run, TorchStep(run, mode)
        self.order = row_order(run, run.spec.rows // run.spec.batch_size)
        self.position = torch.zeros(1, dtype=torch.int64, device=run.device)
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with matmul_precision(run):
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    self._whole_step()
            torch.cuda.current_stream().wait_stream(stream)
            with capturing(self.graph, stream=stream):
                self._whole_step()

    def _whole_step(self) -> None:
        rows = self.order.index_select(0, self.position)[0]
        self.step(self.run.x[rows], self.run.y[rows])
        self.position.add_(1).remainder_(len(self.order))

    def __call__(self, count: int) -> None:
        for _ in range(count):
            self.graph.replay()
        if self.run.validation is not None:
            self.step.validation_loss(*self.run.validation)


def seconds_of(steps: Steps, count: int, units: int) -> Callable[[], float]:
    """A function that takes `count` steps and returns the seconds per unit, the device's work included; `units` units
    are `count` steps."""

    def work() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        steps(count)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / units

    return work
