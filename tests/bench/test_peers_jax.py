from __future__ import annotations

from dataclasses import replace

import pytest

from onelaunch.bench.cases.train import TOLERANCE
from onelaunch.bench.peers_jax import jax_scan, jax_unavailable_reason
from onelaunch.bench.peers_torch import reference_losses, row_order, worst_relative
from onelaunch.bench.workload import Workload
from tests.bench.workloads import CPU, WORKLOADS


@pytest.mark.parametrize(("workload", "unroll"), [(one, (1, 10)[i % 2]) for i, one in enumerate(WORKLOADS)], ids=str)
def test_the_jax_peer_trains_the_same_run(workload: Workload, unroll: int) -> None:
    if reason := jax_unavailable_reason(CPU):
        pytest.skip(reason)
    run = workload.run(CPU, rows=64, held_out=16, steps=20)
    scan = jax_scan(run, row_order(run, 20), unroll)
    losses, _ = scan()
    assert worst_relative(losses.tolist(), reference_losses(run, 20)) < TOLERANCE[workload.precision]


def test_the_jax_peer_flattens_images_as_the_model_does() -> None:
    if reason := jax_unavailable_reason(CPU):
        pytest.skip(reason)
    run = WORKLOADS[-1].run(CPU, rows=64, held_out=16, steps=20)
    assert run.validation is not None
    x, y = run.validation
    run = replace(run, x=run.x.view(64, 3, 4), validation=(x.view(16, 3, 4), y))
    losses, _ = jax_scan(run, row_order(run, 20))()
    assert worst_relative(losses.tolist(), reference_losses(run, 20)) < TOLERANCE["fp32"]
