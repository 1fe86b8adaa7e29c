"""Recorded steps on tapes against plain loops, where the optimizer or its gradients change between replays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onelaunch.step.capturable_optimizer import CapturableOptimizer
from tests.conftest import WEIGHT_TOLERANCE
from tests.reference import assert_same_weights
from tests.step.loops import batches, network
from tests.step.tape import assert_follows_a_plain_loop, taped_step

pytestmark = pytest.mark.usefixtures("no_code", "tapes")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def keep_first(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


def drop_in_place(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][1:]


def another_state(model: Any, optimizer: Any) -> None:
    optimizer.state = type(optimizer.state)(dict)


OPTIMIZER_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a cleared state": lambda model, optimizer: optimizer.state.clear(),
    "another state": another_state,
    "another state of one parameter": lambda model, optimizer: optimizer.state.update({model[0].weight: {}}),
    "fewer parameters": keep_first,
    "fewer parameters in the same list": drop_in_place,
    "weight decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
    "a tensor of the user's own": lambda model, optimizer: optimizer.param_groups[0].update(mask=torch.ones(3)),
}


@pytest.mark.parametrize("name", OPTIMIZER_CHANGES)
def test_a_change_of_the_optimizer_counts(name: str) -> None:
    step = assert_follows_a_plain_loop(network(), batches(14), OPTIMIZER_CHANGES[name], momentum=0.9)
    assert step.reason == ""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_are_frozen_or_unfrozen_on_the_way(frozen: bool, accumulate: int) -> None:
    """A frozen one does not move at all; one that is unfrozen has no momentum yet, which the fused form of SGD refuses."""
    model = network()
    model[0].requires_grad_(not frozen)
    step = assert_follows_a_plain_loop(
        model, batches(24), lambda model, _: model[0].requires_grad_(frozen), at=10, accumulate=accumulate, momentum=0.9,
        weight_decay=0.1,
    )  # fmt: skip
    assert step.reason == ""


def test_a_layer_that_is_unfrozen_has_no_momentum_to_dampen() -> None:
    model = network()
    model[0].requires_grad_(False)
    step = assert_follows_a_plain_loop(
        model, batches(24), lambda model, _: model[0].requires_grad_(True), at=10, momentum=0.9, dampening=0.5
    )
    assert step.reason == ""


def test_the_rate_may_be_a_tensor_elsewhere_that_changes_in_place() -> None:
    def halve(optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64))
    capturable = CapturableOptimizer(optimizer, torch.device("cpu:0"))
    capturable.prepare()
    for number in range(4):
        assert capturable.ready()
        assert float(capturable.rates[0]) == pytest.approx(0.1 / 2**number)
        halve(optimizer)


def test_changes_of_the_model_and_of_the_optimizer_at_once() -> None:
    """The first is no change that forward makes: the next one of its kind counts too."""
    model = network(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, recordings = taped_step(model, optimizer)
    (data, *_) = batches(1)
    for changed in (0.2, 0.3):
        model[2].p = changed
        optimizer.param_groups[0]["weight_decay"] = changed
        for _ in range(4):
            step(*data)
        assert len(recordings) == 1
    (recorded,) = recordings.all()
    before = recorded.graph.replays
    model[2].p = 0.4
    step(*data)
    assert recorded.graph.replays == before


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_that_the_caller_releases(momentum: float) -> None:
    """`optimizer.zero_grad()` may have stayed in the loop: recordings with `accumulate` go on adding to the same memory."""
    step = assert_follows_a_plain_loop(
        network(), batches(26), lambda model, optimizer: optimizer.zero_grad(), at=None, accumulate=2, momentum=momentum,
    )  # fmt: skip
    assert step.reason == ""


def test_a_flush_has_the_gradients_of_a_window_that_began_after_zero_grad() -> None:
    model = network()
    other = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    step, _ = taped_step(model, mine, accumulate=4)
    for number, (x, y) in enumerate(batches(22)):
        if number == 20:
            mine.zero_grad()
        step(x, y)
        waiting = 2 if number >= 20 else 4
        (F.cross_entropy(other(x), y) / waiting).backward()
        if number % 4 == 3:
            theirs.step()
            theirs.zero_grad()
    step.flush()
    theirs.step()
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
