from __future__ import annotations

import math

import pytest
import torch

from onelaunch.bench.cases.train import TOLERANCE
from onelaunch.bench.peers_torch import Captured, reference_losses, row_order, worst_relative
from onelaunch.bench.torch_step import TorchStep
from onelaunch.bench.workload import Workload
from onelaunch.rng import permutation
from tests.bench.workloads import CPU, WORKLOADS


def test_row_order_is_that_of_fit() -> None:
    run = WORKLOADS[0].run(CPU, rows=20, epochs=2)
    order = row_order(run, 3)
    assert order[:2].flatten().equal(permutation(20, 0, 0)[:16])  # the last 4 rows are not a full batch
    assert order[2].equal(permutation(20, 0, 1)[:8])


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.usefixtures("one_thread")
def test_the_torch_step_follows_float64(workload: Workload) -> None:
    run = workload.run(CPU, rows=64, steps=40)
    step = TorchStep(run)
    losses = [step(run.x[rows], run.y[rows]).item() for rows in row_order(run, 40)]
    assert worst_relative(losses, reference_losses(run, 40)) < TOLERANCE[workload.precision]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its imports and about fp32 products
@pytest.mark.parametrize("mode", [None, "default"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_captured_step_trains_the_same_run(mode: str | None, optimizer: str) -> None:
    run = Workload((12, 16, 5), 8, optimizer).run(torch.device("cuda"), rows=64, steps=8)
    step = TorchStep(run)
    for rows in [*row_order(run, 8), *row_order(run, 8)]:  # the order of the first epoch repeats
        step(run.x[rows], run.y[rows])
    trained = Captured(run, mode)
    trained(13)  # after three before the capture
    for ours, theirs in zip(trained.step.model.parameters(), step.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_missing_losses_do_not_agree():
    assert worst_relative([1.0], torch.ones(50, dtype=torch.float64)) == math.inf
    assert worst_relative([1.0, 1.0], torch.ones(2, dtype=torch.float64)) == 0
