"""The chosen placement fits the network and the chip; a network that does not fit is refused with the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from onelaunch.device import A100, H200
from onelaunch.engines.resident.plan.placement import choose_plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import MAX_BATCH, MAX_OUTPUTS
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from onelaunch.engines.stages import UnsupportedNetworkError
from tests.engines.resident.invariants import assert_whole
from tests.engines.resident.planning import LAYERS, plan_of, rows_plan, settings_of


@pytest.mark.parametrize("uint8_rows", [True, False])
def test_a_small_network_trains_in_a_cluster(uint8_rows):
    plan = plan_of(LAYERS, uint8_rows=uint8_rows)
    assert plan.cluster
    assert plan.micro_batches == 1
    assert not any(layer.masters_shared for layer in plan.layers)


def test_a_wide_network_trains_over_the_grid():
    plan = plan_of([784, 784, 784, 784, 10], batch=64, uint8_rows=True)
    assert not plan.cluster
    assert 16 < plan.blocks <= H200.multiprocessors
    assert_whole(plan)


def test_a_narrow_network_with_many_rows_divides_them():
    plan = plan_of([64, 64, 64, 16], batch=256)
    assert isinstance(plan, RowsPlan)
    assert_whole(plan)


def test_rows_are_not_divided_where_weights_would_spill():
    """54 tiles of masters and as many of gradients exceed the registers of a thread."""
    refusal = rows_plan([784, 64, 64, 10], 1, 16, batch=128).refusal
    assert re.search("108 tiles of weights and gradients do not fit", refusal)
    assert isinstance(plan_of([784, 64, 64, 10], batch=128, chip=A100), UnitsPlan)


def test_a_tiny_network_or_one_linear_stays_in_one_block():
    assert plan_of([4, 8, 3]).blocks == 1
    assert plan_of([784, 10]).blocks == 1


def test_a_chip_without_clusters_gets_a_grid():
    plan = plan_of(LAYERS, chip=A100)
    assert not plan.cluster
    assert plan.blocks > 1
    assert "this chip has no clusters" in plan.describe()
    with pytest.raises(UnsupportedNetworkError):
        plan_of(LAYERS, chip=A100, blocks=8, cluster=True)


@pytest.mark.parametrize(("batch", "by_rows"), [(1000, False), (4000, True)])
def test_more_rows_than_fit_take_several_passes(batch, by_rows):
    plan = plan_of([64, 64, 64, 16], batch=batch, by_rows=by_rows)
    assert plan.micro_batches > 1
    assert_whole(plan)
    assert f"a batch takes {plan.micro_batches} passes" in plan.describe()


def test_weights_move_to_shared_memory_when_registers_run_out():
    one_block = {"blocks": 1, "by_rows": False}
    plan = choose_plan(settings_of([600, 48, 10], batch=16), H200, reserved_registers=160, **one_block)
    assert plan.layers[0].masters_shared
    assert "masters in shared memory" in plan.describe()
    adam, cluster = settings_of(LAYERS, optimizer="adam"), {"blocks": 16, "cluster": True, "by_rows": False}
    free, crowded = choose_plan(adam, H200, **cluster), choose_plan(adam, H200, reserved_registers=184, **cluster)
    assert sum(layer.register_states for layer in crowded.layers) < sum(layer.register_states for layer in free.layers)


@pytest.mark.parametrize(
    ("widths", "changes", "reason"),
    [
        ([8, 16, MAX_OUTPUTS + 1], {}, f"{MAX_OUTPUTS + 1} outputs, this engine takes up to {MAX_OUTPUTS}"),
        ([8, 16, 4], {"batch": MAX_BATCH + 1}, f"batch_size={MAX_BATCH + 1} is above the {MAX_BATCH} rows"),
        ([784, 4096, 4096, 10], {}, r"does not fit on the chip: \d+ blocks need \d+ KiB of shared memory each, 227 are there"),
        ([100_000, 10], {}, "does not fit on the chip: 1 blocks need"),
    ],
)  # fmt: skip
def test_a_network_that_does_not_fit_is_refused_with_the_reason(widths, changes, reason):
    with pytest.raises(UnsupportedNetworkError, match=reason):
        plan_of(widths, **changes)


def test_a_refused_network_needs_more_memory_than_there_is():
    request = settings_of([1024, 128, 10], batch=32, precision="fp32", optimizer="adam")
    with pytest.raises(UnsupportedNetworkError, match=r"need 228 KiB of shared memory each, 227 are there"):
        choose_plan(request, replace(H200, largest_cluster=8))
