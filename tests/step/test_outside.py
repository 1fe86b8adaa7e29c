"""Recorded steps on tapes, where the loss or forward depends on what is outside: variables, random numbers of the host."""

from __future__ import annotations

import copy
import functools
import math
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelaunch.step.outside import outside_variables
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.loops import batches, network, plain_losses
from tests.step.tape import taped_step

pytestmark = pytest.mark.usefixtures("no_code", "tapes")


beta = 1.0


def weighted(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * beta


def test_a_variable_of_the_loss_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a weight that grows from epoch to epoch: the recording has its value."""
    scale = 1.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return weighted(output, target) * scale

    model = network()
    other, data = copy.deepcopy(model), batches(24)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    step, recordings = taped_step(model, mine, loss)
    losses, expected = [], []
    for number, batch in enumerate(data):
        if number == 8:
            scale = 0.5
        if number == 16:
            monkeypatch.setattr(sys.modules[__name__], "beta", 2.0)
        losses.append(float(step(*batch)))
        expected += plain_losses(other, theirs, [batch], loss=loss)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert step.reason == ""
    assert len(recordings) == 1


def without_bias(model: Any) -> nn.Module:
    model[3].bias = None
    return model


def copied_weights(model: Any, source: nn.Module) -> Any:
    model.load_state_dict(source.state_dict())
    return model


def test_a_network_that_the_loss_reads_may_be_replaced_or_changed() -> None:
    """Such as the target network of DQN."""

    def train(model: nn.Module, taped: bool) -> tuple[list[float], Any]:
        target = copy.deepcopy(model)

        def loss(output: Tensor, x: Tensor) -> Tensor:
            return F.mse_loss(output, target(x).detach() + 1)

        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        step: Any = None
        if taped:
            step, _ = taped_step(model, optimizer, loss)
        for number, (x, _) in enumerate(data):
            if number == 8:
                target = copy.deepcopy(model)
            if number == 16:
                target = copied_weights(target, model)
            if number == 22:
                target = without_bias(target)
            losses += [float(step(x, x))] if taped else plain_losses(model, optimizer, [(x, x)], loss=loss)
        return losses, step

    data, model = batches(30), network()
    expected, _ = train(copy.deepcopy(model), taped=False)
    losses, step = train(model, taped=True)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert step.reason == ""
    assert step._recordings._forgotten == 2  # copied weights are read where they are
    assert len(step._recordings) == 1


def test_a_variable_of_the_loss_that_always_changes_is_named() -> None:
    weight, model, data = 0.0, network(), batches(12)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * weight

    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for number, (x, y) in enumerate(data):
        weight = 1 / (1 + number)
        expected = loss(model(x), y).item()
        assert float(step(x, y)) == pytest.approx(expected)
    name = "test_a_variable_of_the_loss_that_always_changes_is_named.<locals>.loss"
    assert step.reason == f"weight in {name} (a tensor may change, by fill_ or copy_) changes again and again"


def test_a_variable_that_begins_later_and_a_function_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script whose loop sets the variable first, and in a notebook whose cell runs again."""

    def half(output: Tensor) -> Tensor:
        return output * 0.5

    def twice(output: Tensor) -> Tensor:
        return output * 2

    helper, number, model = twice, 0, network()

    def change(number: int) -> None:
        nonlocal helper
        if number == 8:
            monkeypatch.setattr(sys.modules[__name__], "later", 0.5, raising=False)
        if number == 16:
            helper = half

    def loss(output: Tensor, target: Tensor) -> Tensor:
        weight = later if number >= 8 else 0.0  # type: ignore[name-defined]  # noqa: F821
        return F.cross_entropy(helper(output), target) + weight * output.square().mean()

    other, data = copy.deepcopy(model), batches(24)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    step, recordings = taped_step(model, mine, loss)
    losses, expected = [], []
    for index, batch in enumerate(data):
        number = 8 if index >= 8 else 0
        change(index)
        losses.append(float(step(*batch)))
        expected += plain_losses(other, theirs, [batch], loss=loss)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert step.reason == ""
    assert recordings._forgotten == 2


def test_equal_values_and_not_a_number_cost_no_recording() -> None:
    weight, model, data = 1.0, network(), batches(12)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (1.0 if math.isnan(unknown) else weight)

    unknown = math.nan
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for x, y in data:
        weight, unknown = float("1.0"), float("nan")
        step(x, y)
    assert recordings._forgotten == 0
    assert [one.graph.replays for one in recordings._recorded.values()] == [10]


def wraps(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def inside(*args: Any) -> Any:
        return function(*args)

    return inside


class Reads(nn.Module):
    """It has an attribute that is called like a variable that it does not read."""

    F = 1.0

    @wraps
    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x) * self.F

    def helper(self, x: Tensor) -> Tensor:
        return torch.relu(x) * beta

    def other(self) -> Any:
        return np


class Settings:
    factor, unread = 1.0, 2.0

    def __init__(self) -> None:
        self.own = 1.0

    @property
    def product(self) -> float:
        return self.own * beta


class Trainer:
    """Its loss depends on its own attributes, on those of others, and on methods."""

    def __init__(self) -> None:
        self.settings, self.weight = Settings(), 1.0
        self.target, self.unread = nn.Sequential(nn.Linear(8, 4)), 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return weighted(output, target) * self.settings.factor

    def loss(self, output: Tensor) -> Tensor:
        return self.target[0](output).sum() * self.scale() + self.settings.product + self.begins_later  # type: ignore[attr-defined]

    def scale(self) -> float:
        return self.weight


this, settings, gamma = sys.modules[__name__], Settings(), 1.0


def names(*roots: Any) -> set[str]:
    return {one.name for one in outside_variables(roots)}


def test_attributes_of_variables_and_of_what_a_method_is_bound_to() -> None:
    trainer = Trainer()
    own = {"settings", "target", "weight", "begins_later", "own", "beta"}
    assert names(trainer.loss) == own
    assert names(lambda output: trainer.loss(output)) >= own | {"trainer"}
    assert names(trainer) == {"weighted", "F", "beta", "settings", "factor"}
    assert names(lambda output: output * this.gamma * settings.factor) == {"this", "gamma", "settings", "factor"}


def test_the_search_runs_no_code_of_others() -> None:
    def raises(self: Any) -> Any:
        raise RuntimeError

    class Raises:
        __dict__ = __class__ = property(raises)  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError

        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        def __hash__(self) -> int:
            raise RuntimeError

    one, dead = Raises(), weakref.proxy(Settings())
    model, data = network(), batches(6)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) if target.dim() else one.value + dead.value

    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for x, y in data[:4]:
        step(x, y)
    one = Raises()
    for x, y in data[4:]:
        step(x, y)
    assert step.reason == ""
    assert recordings._forgotten == 1


def test_an_equal_object_in_the_place_of_another_is_another() -> None:
    arguments, model, data = types.SimpleNamespace(beta=1.0), network(), batches(24)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * arguments.beta

    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    for number, (x, y) in enumerate(data):
        if number == 8:
            arguments = copy.deepcopy(arguments)
        if number == 16:
            arguments.beta = 0.5
        expected = loss(model(x), y).item()
        assert float(step(x, y)) == pytest.approx(expected)
    assert step.reason == ""


class ReadsMore(Reads):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Calls(nn.Module):
    """Through a method of a layer, an attribute that is a function, and a property."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scaled = Reads(), weighted

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.helper(x) * self.factor

    @property
    def factor(self) -> float:
        return settings.factor


def test_variables_are_found_through_calls_and_wrappers() -> None:
    gamma, iter = 2.0, 1.0

    def inner(output: Tensor) -> Tensor:
        return torch.stack([output * gamma for _ in range(2)]).sum()

    def outer(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
        return inner(output) * factor

    @functools.wraps(F.cross_entropy)
    def like(output: Tensor, target: Tensor) -> Tensor:
        return inner(output) * iter

    assert names(nn.Sequential(Reads())) == {"torch", "beta", "function"}
    assert names(inner) == {"torch", "gamma"}
    assert names(functools.partial(outer, factor=2.0)) == {"torch", "gamma", "inner"}
    assert names(torch.compile(inner, backend="eager")) == {"torch", "gamma"}
    assert names(like) >= {"torch", "gamma", "inner", "iter"}
    assert names(Reads().helper) == {"torch", "beta"}
    assert names(wraps(wraps(weighted))) == {"F", "beta", "function"}
    assert names(ReadsMore()) >= {"torch", "beta"}
    assert names(Calls()) >= {"beta", "settings", "factor"}
    assert "unread" not in names(Calls())
    assert names(lambda x, scaled=weighted: scaled(x, x)) == {"F", "beta"}
    assert names(F.cross_entropy, nn.Linear(2, 2), nn.MSELoss(), None, torch.relu) == set()


def test_a_variable_without_a_value_yet() -> None:
    def loss() -> Any:
        return later

    (variable,) = outside_variables([loss])
    assert variable.place.get("later", "none") == "none"
    later = 1.0
    assert variable.place.get("later", "none") == later
