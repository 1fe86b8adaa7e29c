"""Copies of a step, by `copy.deepcopy` and by pickling, train their own model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_weights
from tests.step.loops import batches, network

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_trains_its_own_model(copied: Callable[[Any], Any], compile: bool, device: str) -> None:
    model, data = network(device), batches(8, device)
    step = ol.train_step(model, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), compile=compile)
    for batch in data[:4]:
        step(*batch)
    before, other = copy.deepcopy(model), copied(step)
    losses = [float(other(*batch)) for batch in data[4:]]
    assert_same_weights(model, before, 0.0)
    assert losses == pytest.approx([float(step(*batch)) for batch in data[4:]], rel=LOSS_TOLERANCE)
    assert_same_weights(other.model, model, WEIGHT_TOLERANCE)


class OwnTrainer(nn.Module):
    """A model that has its own step, whose loss function is a method."""

    def __init__(self, owns_loss: bool) -> None:
        super().__init__()
        self.layers = network()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.step = ol.train_step(self, self.loss if owns_loss else F.cross_entropy, self.optimizer, compile=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)


@pytest.mark.parametrize("owns_loss", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_has_its_step_trains_itself(copied: Callable[[Any], Any], owns_loss: bool) -> None:
    model, (first, second) = OwnTrainer(owns_loss), batches(2)
    model.step(*first)
    before, others = copy.deepcopy(model), [copied(model), copied(model.step).model]
    assert all(other.step.model is other for other in others)
    losses = {float(other.step(*second)) for other in others}
    assert_same_weights(model, before, 0.0)
    assert losses == {float(model.step(*second))}
    for other in others:
        assert_same_weights(other, model, 0.0)
    assert repr(others[0].step) == repr(model.step)


def test_a_copy_is_made_whatever_has_become_of_the_model() -> None:
    model, (x, y) = network(), batches(1)[0]
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model[-1].parameters(), lr=0.1), compile=False)
    model[-1] = copy.deepcopy(model[-1])  # the optimizer has the parameters of the layer that was there
    assert float(copy.deepcopy(step)(x, y)) == float(step(x, y))
