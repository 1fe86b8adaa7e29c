"""Plans executed in NumPy follow PyTorch, in whatever order blocks run; and a broken plan is caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.source.source import phase_names
from tests.conftest import TOLERANCE
from tests.engines.resident.fragments import RaceError
from tests.engines.resident.planning import forced_plan, rows_plan
from tests.engines.resident.rows_simulator import RowsBlock
from tests.engines.resident.running import Task
from tests.engines.resident.simulator import Simulation
from tests.engines.resident.units_simulator import UnitsBlock
from tests.reference import ACTIVATIONS, plain_loop, problem

pytestmark = pytest.mark.usefixtures("one_thread")
RELATIVE, ABSOLUTE = TOLERANCE[torch.float64]
Choose = Callable[[list[int]], int]


def at_random(seed: int) -> Choose:
    return random.Random(seed).choice


ORDERS: dict[str, Choose] = {"first as far as it can": min, "last as far as it can": max}


def model_of(widths: list[int], activation: str | None, *, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs, bias=bias))
        layers += [ACTIVATIONS[activation]()] if activation and index < len(widths) - 2 else []
    return nn.Sequential(*layers).double()


def task_of(plan: Plan, *, rows: int = 50, **options: Any) -> tuple[Task, nn.Sequential]:
    """Fresh weights and rows for a plan, and the model that has the same."""
    linears = [layer.stage.linear for layer in plan.layers]
    chain = plan.layers[0].stage.chain
    widths = [linears[0].inputs, *(linear.outputs for linear in linears)]
    model = model_of(widths, chain[0].name if chain else None, bias=linears[0].bias)  # type: ignore[union-attr]
    x, y = problem(plan.settings.loss, rows, widths[0], widths[-1])
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [layer.weight.detach().numpy().copy() for layer in layers]
    biases = [
        np.zeros(len(w)) if layer.bias is None else layer.bias.detach().numpy().copy()
        for layer, w in zip(layers, weights, strict=True)
    ]
    targets = y.numpy() if plan.settings.loss == "cross_entropy" else y.double().numpy()
    return Task(weights, biases, x.double().numpy(), targets, lr=0.3, **options), model


def crowded_plan(widths: list[int], blocks: int, cluster: bool) -> Plan:
    """For a chip where nothing fits: every economy is made."""
    return forced_plan(widths, blocks, cluster, 16, batch=20, chip=Chip(132, 1024, True))


def assert_follows(plan: Plan, choose: Choose, *, rows: int = 50, **options: Any) -> None:
    task, model = task_of(plan, rows=rows, **options)
    y = torch.from_numpy(task.y)
    sgd = {"optimizer": "sgd", "lr": task.lr, "momentum": task.momentum}
    expected = plain_loop(
        model, torch.from_numpy(task.x), y, steps=task.steps, batch_size=plan.settings.batch, options=sgd,
        loss=plan.settings.loss, seed=task.seed,
    )  # fmt: skip
    simulation = Simulation(plan, task)
    losses = simulation.run(choose)
    np.testing.assert_allclose(losses, expected, rtol=RELATIVE, atol=ABSOLUTE)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, (weight, bias) in zip(layers, simulation.weights(), strict=True):
        np.testing.assert_allclose(weight, layer.weight.detach().numpy(), rtol=RELATIVE, atol=ABSOLUTE)
        if layer.bias is not None:
            np.testing.assert_allclose(bias, layer.bias.detach().numpy(), rtol=RELATIVE, atol=ABSOLUTE)


@pytest.mark.parametrize("order", ["first as far as it can", "last as far as it can", "at random"])
@pytest.mark.parametrize(
    ("widths", "blocks", "cluster", "rows", "batch"),
    [
        ([9, 32, 32, 32, 4], 4, True, 16, 16),  # as the engine would
        ([9, 32, 32, 32, 4], 4, False, 16, 16),
        ([20, 17, 23, 5], 3, True, 32, 21),  # odd widths, an odd number of tiles, batches that end in the midst
        ([20, 17, 23, 5], 3, False, 32, 21),
        ([5, 40, 3], 2, True, 16, 37),  # one hidden layer, three passes a step, the last of them short
        ([5, 40, 3], 5, False, 16, 37),
        ([3, 1, 1, 2], 2, True, 16, 1),  # a block that owns nothing real
        ([3, 1, 1, 2], 2, False, 16, 1),
        ([4, 24, 8, 16, 6, 2], 2, True, 128, 100),  # rows in two groups
        ([4, 24, 8, 16, 6, 2], 3, False, 128, 100),
    ],
)
def test_follows_pytorch(widths, blocks, cluster, rows, batch, order):
    plan = forced_plan(widths, blocks, cluster, rows, batch=batch, activation="tanh")
    assert_follows(plan, ORDERS.get(order) or at_random(1), steps=4, checks=2, momentum=0.9)


@pytest.mark.parametrize("order", ["first as far as it can", "last as far as it can", "at random"])
@pytest.mark.parametrize(
    ("widths", "blocks", "rows", "batch", "precision"),
    [
        ([9, 24, 17, 3], 1, 32, 30, "bf16"),
        ([9, 24, 17, 3], 4, 16, 50, "tf32"),  # the last block's rows end in the midst
        ([9, 24, 17, 3], 2, 16, 80, "fp32"),  # three passes a step
        ([5, 8, 3], 8, 16, 20, "bf16"),  # blocks that own no weights, and rows for two of them only
        ([5, 3], 2, 16, 30, "bf16"),
    ],
)
def test_blocks_that_share_the_rows_follow_pytorch(widths, blocks, rows, batch, precision, order):
    plan = rows_plan(widths, blocks, rows, batch=batch, precision=precision, activation="tanh")
    assert_follows(plan, ORDERS.get(order) or at_random(7), rows=100, steps=3, checks=2, momentum=0.9)


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


@pytest.mark.parametrize("cluster", [True, False])
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
def test_every_plane_is_exchanged(precision, cluster):
    assert_follows(forced_plan([6, 24, 17, 3], 3, cluster, 16, batch=16, precision=precision), at_random(3), steps=3)


@pytest.mark.parametrize(
    ("widths", "blocks", "cluster"), [([9, 24, 17, 3], 2, True), ([9, 24, 17, 3], 3, False), ([9, 3], 1, False)]
)
def test_rows_in_one_buffer(widths, blocks, cluster):
    plan = crowded_plan(widths, blocks, cluster)
    assert plan.input_buffers == 1
    assert_follows(plan, at_random(6), checks=2)


@pytest.mark.parametrize("cluster", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_orders_give_the_same_bits(seed, cluster):
    plan = forced_plan([6, 24, 17, 3], 3, cluster, 16, batch=40)
    torch.manual_seed(seed)
    task, _ = task_of(plan, steps=3, checks=1)
    runs = [Simulation(plan, task) for _ in range(2)]
    assert runs[0].run(at_random(seed)) == runs[1].run(min)
    for left, right in zip(runs[0].weights(), runs[1].weights(), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


# A test that cannot fail proves nothing: each of these plans is wrong in one way, and must be caught in every order.


def broken(cluster: bool, *, phases: list[str] | None = None, plan: Plan | None = None, choose: Choose = min) -> None:
    plan = plan or forced_plan([6, 24, 24, 24, 3], 3, cluster, 16, batch=16)
    task, _ = task_of(plan, steps=4, checks=1)
    Simulation(plan, task, phases=phases).run(choose)


@pytest.mark.parametrize("choose", [*ORDERS.values(), at_random(4)], ids=[*ORDERS, "at random"])
@pytest.mark.parametrize("cluster", [True, False])
def test_one_buffer_for_the_first_layers_values_is_caught(cluster, choose, monkeypatch):
    monkeypatch.setattr(Plan, "out_buffers", lambda self, layer: 1)
    with pytest.raises(RaceError, match=r"may still read|finds use"):
        broken(cluster, choose=choose)


@pytest.mark.parametrize(
    ("function", "cluster"), [("back_offset", True), ("back_offset", False), ("copy_offset", False)]
)
def test_one_buffer_for_weights_is_caught(function, cluster, monkeypatch):
    right = getattr(UnitsBlock, function)
    use = 2 if function == "back_offset" else 1  # its place among the arguments
    monkeypatch.setattr(UnitsBlock, function, lambda self, *given: right(self, *given[:use], 0, *given[use + 1 :]))
    with pytest.raises(RaceError, match=r"may still read|finds use"):
        broken(cluster)


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
    assert_follows(forced_plan(widths, blocks, True, rows, batch=batch, loss=loss), at_random(3), rows=60)


@pytest.mark.parametrize("choose", [*ORDERS.values(), at_random(5)], ids=[*ORDERS, "at random"])
@pytest.mark.parametrize("cluster", [True, False])
def test_every_missing_wait_is_caught(cluster, choose):
    names = phase_names(forced_plan([6, 24, 24, 24, 3], 3, cluster, 16, batch=16))
    waits = [name for name in names if name.startswith("wait")]
    assert len(waits) == 5 + cluster
    for wait in waits:
        with pytest.raises(RaceError, match=r"has not waited|finds"):
            broken(cluster, phases=[name for name in names if name != wait], choose=choose)


def test_weights_of_the_way_back_not_awaited_are_caught(monkeypatch):
    """The deltas that were waited for left later, but stores to another block keep no order."""
    monkeypatch.setattr(
        UnitsBlock,
        "wait_for_deltas",
        lambda self, layer: self.wait(self.plan.deltas_exchange(layer), self.backs, layer),
    )
    with pytest.raises(RaceError, match="weights back, use 0: block 0 has not waited"):
        broken(True)
    broken(False)  # in a grid the flag raised after them covers them


def test_a_missing_publisher_is_a_wait_in_vain():
    names = phase_names(forced_plan([6, 24, 24, 24, 3], 3, True, 16, batch=16))
    with pytest.raises(RaceError, match="what never comes"):
        broken(True, phases=[name for name in names if name != "forward 1"])


@pytest.mark.parametrize("cluster", [True, False])
def test_two_owners_of_a_tile_are_caught(cluster, monkeypatch):
    right = UnitsBlock.left_offset

    def beside(self: UnitsBlock, layer: Layer, plane: int, row_tile: int, place: int, half: int) -> int:
        return right(self, layer, plane, row_tile, place - (self.rank == 2), half)

    monkeypatch.setattr(UnitsBlock, "left_offset", beside)
    with pytest.raises(RaceError, match="both write"):
        broken(cluster)


def test_a_slot_too_small_is_caught(monkeypatch):
    whole = Plan.out_bytes
    monkeypatch.setattr(Plan, "out_bytes", lambda self, layer: whole(self, layer) - 512 * (layer.index == 1))
    with pytest.raises(RaceError, match="outside"):
        broken(True)


def test_rows_fetched_too_early_are_caught():
    plan = crowded_plan([9, 24, 17, 3], 2, True)
    fetch, names = "fetch the next rows", phase_names(plan)
    names.remove(fetch)
    names.insert(names.index("update 0"), fetch)
    with pytest.raises(RaceError, match="needs the rows of pass 0"):
        broken(True, plan=plan, phases=names)


@pytest.mark.parametrize("widths", [[9, 24, 17, 3], [9, 24, 17, 20, 3]])
@pytest.mark.parametrize("batch", [16, 40])  # with an update in the next pass, and without
def test_rows_brought_to_all_over_rows_that_others_read_are_caught(widths, batch):
    plan = forced_plan(widths, 3, True, 16, batch=batch)
    assert plan.shares_fetch
    assert_follows(plan, at_random(4), checks=2)
    fetch, names = "fetch the next rows", phase_names(plan)
    names.remove(fetch)
    names.insert(names.index("wait for values 0"), fetch)
    with pytest.raises(RaceError, match="fetches over rows"):
        broken(True, plan=plan, phases=names)


@pytest.mark.parametrize("blocks", [2, 8])  # all of them, or some, own weights
def test_one_buffer_for_bias_parts_is_caught(blocks, monkeypatch):
    """New weights leave before the biases' parts are read, so whoever has all of them may be a step ahead."""
    right = RowsBlock.bias_offset
    monkeypatch.setattr(RowsBlock, "bias_offset", lambda self, sender, use: right(self, sender, 0))
    with pytest.raises(RaceError, match=r"bias parts.*(may still read|finds use)"):
        broken(True, plan=rows_plan([5, 8, 3], blocks, 16, batch=16 * blocks))


def test_weights_read_before_they_arrive_are_caught():
    plan = rows_plan([5, 8, 3], 2, 16, batch=32)
    names = phase_names(plan)
    with pytest.raises(RaceError, match="weights: block 0 reads use 1 and finds use 0"):
        broken(True, plan=plan, phases=[name for name in names if name != "update"])
