"""Plans by units executed in NumPy follow PyTorch in whatever order blocks run, and a broken plan is caught."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from tests.engines.resident.fragments import RaceError
from tests.engines.resident.planning import forced_plan
from tests.engines.resident.simulated import ORDERS, assert_follows, at_random, crowded_plan, run_broken, task_of
from tests.engines.resident.simulator import Simulation
from tests.engines.resident.units_simulator import UnitsBlock

pytestmark = pytest.mark.usefixtures("one_thread")


def deep_plan(cluster: bool) -> UnitsPlan:
    """Three hidden layers, three blocks: the plan that the tests below break."""
    return forced_plan([6, 24, 24, 24, 3], 3, cluster, 16, batch=16)


@pytest.mark.parametrize(
    ("widths", "blocks", "cluster", "rows", "batch", "order"),
    [
        ([9, 32, 32, 32, 4], 4, True, 16, 16, "lowest rank first"),  # as the engine would choose
        ([9, 32, 32, 32, 4], 4, False, 16, 16, "highest rank first"),
        ([20, 17, 23, 5], 3, True, 32, 21, "at random"),  # odd widths, an odd number of tiles, batches that end within a tile
        ([20, 17, 23, 5], 3, False, 32, 21, "lowest rank first"),
        ([5, 40, 3], 2, True, 16, 37, "highest rank first"),  # one hidden layer, three passes per step, the last one short
        ([5, 40, 3], 5, False, 16, 37, "at random"),
        ([3, 1, 1, 2], 2, True, 16, 1, "lowest rank first"),  # a block whose units are all padding
        ([3, 1, 1, 2], 2, False, 16, 1, "highest rank first"),
        ([4, 24, 8, 16, 6, 2], 2, True, 128, 100, "at random"),  # rows in two groups
        ([4, 24, 8, 16, 6, 2], 3, False, 128, 100, "at random"),
    ],
)  # fmt: skip
def test_follows_pytorch(widths, blocks, cluster, rows, batch, order):
    plan = forced_plan(widths, blocks, cluster, rows, batch=batch, activation="tanh")
    assert_follows(plan, ORDERS[order](), steps=4, validation_passes=2, momentum=0.9)


@pytest.mark.parametrize(
    ("widths", "changes"),
    [
        ([7, 3], {}),
        ([7, 3], {"loss": "mse", "bias": False}),
        ([7, 12, 9, 3], {"activation": None}),
        ([7, 12, 9, 3], {"loss": "mse", "bias": False, "activation": "relu"}),
    ],
)
def test_one_block_follows_pytorch(widths, changes):
    assert_follows(forced_plan(widths, 1, False, 32, batch=20, **changes), at_random(2))


@pytest.mark.parametrize(("precision", "cluster"), [("tf32", True), ("fp32", True), ("tf32", False), ("fp32", False)])
def test_every_plane_is_exchanged(precision, cluster):
    assert_follows(forced_plan([6, 24, 17, 3], 3, cluster, 16, batch=16, precision=precision), at_random(3), steps=3)


@pytest.mark.parametrize(
    ("widths", "blocks", "cluster"), [([9, 24, 17, 3], 2, True), ([9, 24, 17, 3], 3, False), ([9, 3], 1, False)]
)
def test_one_buffer_of_rows_follows_pytorch(widths, blocks, cluster):
    plan = crowded_plan(widths, blocks, cluster)
    assert plan.input_buffers == 1
    assert_follows(plan, at_random(6), validation_passes=2)


@pytest.mark.parametrize(
    ("widths", "blocks", "rows", "batch", "loss"),
    [
        ([20, 40, 24, 64], 2, 48, 37, "cross_entropy"),
        ([20, 48, 33], 4, 32, 20, "mse"),
        ([30, 128, 128, 20], 16, 32, 50, "cross_entropy"),
        ([30, 128, 10], 16, 16, 7, "cross_entropy"),
    ],
)
def test_outputs_are_summed_over_clusters_of_every_size(widths, blocks, rows, batch, loss):
    plan = forced_plan(widths, blocks, True, rows, batch=batch, loss=loss)
    assert_follows(plan, at_random(3), rows=60, steps=3)


@pytest.mark.parametrize("cluster", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_random_orders_give_the_same_bits(seed, cluster):
    plan = forced_plan([6, 24, 17, 3], 3, cluster, 16, batch=40)
    torch.manual_seed(seed)
    task, _ = task_of(plan, steps=3, validation_passes=1)
    runs = [Simulation(plan, task) for _ in range(2)]
    assert runs[0].run(at_random(seed)) == runs[1].run(min)
    for left, right in zip(runs[0].weights(), runs[1].weights(), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


# A test that cannot fail proves nothing. Each plan below is wrong in one way, and must be caught.


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cluster", [True, False])
def test_one_buffer_for_the_first_layers_values_is_caught(cluster, order, monkeypatch):
    monkeypatch.setattr(UnitsPlan, "out_buffers", lambda self, layer: 1)
    with pytest.raises(RaceError, match=r"may still read|finds use"):
        run_broken(deep_plan(cluster), choose=ORDERS[order]())


@pytest.mark.parametrize(
    ("function", "cluster"), [("back_offset", True), ("back_offset", False), ("copy_offset", False)]
)
def test_one_buffer_for_weights_is_caught(function, cluster, monkeypatch):
    offset = getattr(UnitsBlock, function)
    use = 2 if function == "back_offset" else 1  # its position among the arguments
    monkeypatch.setattr(UnitsBlock, function, lambda self, *given: offset(self, *given[:use], 0, *given[use + 1 :]))
    with pytest.raises(RaceError, match=r"may still read|finds use"):
        run_broken(deep_plan(cluster))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cluster", [True, False])
def test_every_missing_wait_is_caught(cluster, order):
    plan = deep_plan(cluster)
    waits = [name for name in plan.phase_names() if name.startswith("wait")]
    assert len(waits) == 5 + cluster
    for wait in waits:
        with pytest.raises(RaceError, match=r"has not waited|finds"):
            run_broken(plan, phases=[name for name in plan.phase_names() if name != wait], choose=ORDERS[order]())


def test_a_missing_wait_for_weights_of_the_backward_pass_is_caught(monkeypatch):
    """The awaited deltas were sent later than the weights, but stores into another block's memory are not ordered."""
    monkeypatch.setattr(
        UnitsBlock,
        "wait_for_deltas",
        lambda self, layer: self.wait(self.plan.deltas_exchange(layer), self.backs, layer),
    )
    with pytest.raises(RaceError, match="weights back, use 0: block 0 has not waited"):
        run_broken(deep_plan(True))
    run_broken(deep_plan(False))  # in a grid, the flag that is raised after the weights covers them


def test_a_missing_publisher_ends_in_a_deadlock():
    plan = deep_plan(True)
    with pytest.raises(RaceError, match="what never comes"):
        run_broken(plan, phases=[name for name in plan.phase_names() if name != "forward 1"])


@pytest.mark.parametrize("cluster", [True, False])
def test_two_owners_of_a_tile_are_caught(cluster, monkeypatch):
    offset = UnitsBlock.left_offset

    def shifted(self: UnitsBlock, layer: Layer, plane: int, row_tile: int, tile: int, half: int) -> int:
        return offset(self, layer, plane, row_tile, tile - (self.rank == 2), half)

    monkeypatch.setattr(UnitsBlock, "left_offset", shifted)
    with pytest.raises(RaceError, match="both write"):
        run_broken(deep_plan(cluster))


def test_a_slot_too_small_is_caught(monkeypatch):
    whole = UnitsPlan.out_bytes
    monkeypatch.setattr(UnitsPlan, "out_bytes", lambda self, layer: whole(self, layer) - 512 * (layer.index == 1))
    with pytest.raises(RaceError, match="outside"):
        run_broken(deep_plan(True))


def test_rows_fetched_too_early_are_caught():
    plan = crowded_plan([9, 24, 17, 3], 2, True)
    fetch, names = "fetch the next rows", plan.phase_names()
    names.remove(fetch)
    names.insert(names.index("update 0"), fetch)
    with pytest.raises(RaceError, match="needs the rows of pass 0"):
        run_broken(plan, phases=names)


@pytest.mark.parametrize("widths", [[9, 24, 17, 3], [9, 24, 17, 20, 3]])
@pytest.mark.parametrize("batch", [16, 40])  # with an update in the next pass, and without
def test_multicast_over_rows_that_others_read_is_caught(widths, batch):
    plan = forced_plan(widths, 3, True, 16, batch=batch)
    assert plan.multicasts_rows
    assert_follows(plan, at_random(4), steps=4, validation_passes=2)
    fetch, names = "fetch the next rows", plan.phase_names()
    names.remove(fetch)
    names.insert(names.index("wait for values 0"), fetch)
    with pytest.raises(RaceError, match="fetches over rows"):
        run_broken(plan, phases=names)
