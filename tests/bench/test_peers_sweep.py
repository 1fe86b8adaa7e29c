"""The peers of a sweep train the same members, and so does the check's own engine."""

from __future__ import annotations

import pytest
import torch

from onelaunch.bench.cases import sweep
from onelaunch.bench.cases.train import TOLERANCE
from onelaunch.bench.peers_jax import jax_unavailable_reason
from onelaunch.bench.peers_sweep import TorchVmap, jax_vmap_scan
from onelaunch.bench.peers_torch import reference_losses, worst_relative
from onelaunch.bench.workload import Workload

CPU = torch.device("cpu")
STEPS, MEMBERS = 12, 3
WORKLOADS = [Workload((6, 9, 8, 3), 8, "adam"), Workload((6, 9, 3), 8, "sgd")]


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(sweep, "ROWS", 8 * STEPS)


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.usefixtures("few_rows")
def test_jax_trains_the_same_members(workload):
    if reason := jax_unavailable_reason(CPU):
        pytest.skip(reason)
    runs = sweep.member_runs(workload, CPU, MEMBERS, STEPS)
    losses = jax_vmap_scan(runs, STEPS, unroll=4)()
    for number, run in enumerate(runs):
        gap = worst_relative(losses[:, number].tolist(), reference_losses(run, STEPS))
        assert gap < TOLERANCE["fp32"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
@pytest.mark.usefixtures("few_rows", "one_thread")
def test_torch_func_trains_the_same_members(workload):
    runs = sweep.member_runs(workload, CPU, MEMBERS, STEPS)
    references = [reference_losses(run, STEPS) for run in runs]
    vmapped = TorchVmap(runs, STEPS)
    losses = []
    for _ in range(STEPS):
        vmapped(1)
        losses.append(vmapped.losses.tolist())
    for number, reference in enumerate(references):
        assert worst_relative([step[number] for step in losses], reference) < TOLERANCE["fp32"]


@pytest.mark.usefixtures("few_rows", "one_thread")
def test_the_check_of_the_members_can_fail(monkeypatch):
    monkeypatch.setattr(sweep, "ROWS", 8 * sweep.CHECKED_STEPS)
    sweep.check_members(WORKLOADS[0], CPU, MEMBERS)
    wrong = sweep.reference_losses
    monkeypatch.setattr(sweep, "reference_losses", lambda run, steps: wrong(run, steps) * 1.001)
    with pytest.raises(AssertionError, match="losses of member 0 differ"):
        sweep.check_members(WORKLOADS[0], CPU, MEMBERS)
