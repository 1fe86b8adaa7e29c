"""Schedulers that change more than the learning rate: recorded steps read it on the device too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, StepLR

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights
from tests.step.loops import batches, network, plain_losses
from tests.step.tape import taped_step

pytestmark = pytest.mark.usefixtures("no_code")
STEPS = 24


class DecaySchedule:
    """Weight decay that grows, as in self-supervised training."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] += 0.01


def one_cycle(optimizer: Optimizer) -> Any:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1)


def cyclic(optimizer: Optimizer) -> Any:
    return CyclicLR(optimizer, base_lr=0.01, max_lr=0.05, step_size_up=4)


def two_groups(model: Any, kind: type[Optimizer], **options: Any) -> Optimizer:
    return kind([{"params": model[0].parameters(), "lr": 0.02}, {"params": model[3].parameters()}], lr=0.01, **options)


def train(step: Any, schedule: Any, data: Any, every: int = 1) -> list[float]:
    losses = []
    for number, (x, y) in enumerate(data, 1):
        losses.append(step(x, y))
        if number % every == 0:
            schedule.step()
    return torch.stack(losses).tolist()


CASES = [
    (SGD, {"momentum": 0.9}, one_cycle),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, cyclic),
    (SGD, {}, DecaySchedule),
    (Adam, {}, one_cycle),
    (AdamW, {}, DecaySchedule),
    (AdamW, {"betas": (0.8, 0.9)}, one_cycle),
]


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("kind", "options", "schedule"), CASES)
def test_a_schedule_of_momentum_or_weight_decay_is_recorded_once(
    kind: type[Optimizer], options: dict[str, Any], schedule: Callable[[Optimizer], Any], accumulate: int
) -> None:
    torch.manual_seed(0)
    model = network("cuda")
    other, data = copy.deepcopy(model), batches(STEPS, "cuda")
    mine, theirs = (two_groups(one, kind, **options) for one in (model, other))
    step = ol.train_step(model, F.cross_entropy, mine, accumulate=accumulate)
    losses = train(step, schedule(mine), data, accumulate)
    assert step.reason == ""
    assert len(step._recordings) == accumulate
    assert step._recordings._changes.count == 0
    expected = plain_losses(other, theirs, data, every=accumulate, scheduler=schedule(theirs))
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    for group, their_group in zip(mine.param_groups, theirs.param_groups, strict=True):
        for name in ("lr", "betas", "momentum", "weight_decay"):
            assert group.get(name) == their_group.get(name)


def assert_a_cycled_momentum_ends_recording(device: str, kind: type[Optimizer], **options: Any) -> None:
    torch.manual_seed(0)
    model = network(device)
    other, data = copy.deepcopy(model), batches(STEPS, device)
    mine, theirs = (two_groups(one, kind, **options) for one in (model, other))
    step: Any = ol.train_step(model, F.cross_entropy, mine) if device == "cuda" else taped_step(model, mine)[0]
    losses = train(step, one_cycle(mine), data)
    assert step.reason == "what the optimizer has beside the learning rate changes again and again"
    assert_same_course(losses, plain_losses(other, theirs, data, scheduler=one_cycle(theirs)), LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)


@pytest.mark.usefixtures("tapes")
def test_an_update_of_pytorch_on_a_tape_has_its_momentum_in_the_recording() -> None:
    assert_a_cycled_momentum_ends_recording("cpu", SGD, momentum=0.9)


@pytest.mark.gpu
def test_an_update_of_pytorch_has_its_momentum_in_the_recording() -> None:
    assert_a_cycled_momentum_ends_recording("cuda", Adam, amsgrad=True)


@pytest.mark.usefixtures("tapes")
def test_a_scheduler_that_is_made_after_the_recording_does_not_warn() -> None:
    model = network()
    step, recordings = taped_step(model, SGD(model.parameters(), lr=0.1))
    data = batches(6)
    train(step, DecaySchedule(SGD([torch.zeros(1)])), data)
    assert len(recordings) == 1
    train(step, StepLR(step.optimizer, 2), data)
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
