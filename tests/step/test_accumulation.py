"""Gradients of several batches for one step of the optimizer: windows that are cut short, and those that others break."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights
from tests.step.loops import batches, network, plain_losses

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_flush_steps_with_the_mean_of_the_batches_that_wait(device: str, clip: float | None) -> None:
    """Five batches per epoch in windows of three: the last two of an epoch have a step of their own."""
    model, epochs = network(device), [batches(5, device) for _ in range(5)]
    other = copy.deepcopy(model)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, other)]
    mine, theirs = (torch.optim.lr_scheduler.ExponentialLR(one, 0.8) for one in optimizers)
    step = ol.train_step(model, F.cross_entropy, optimizers[0], accumulate=3, clip_norm=clip)
    losses, expected = [], []
    for data in epochs:
        losses += [float(step(x, y)) for x, y in data]
        step.flush()
        step.flush()  # nothing waits
        mine.step()
        for window in (data[:3], data[3:]):
            for x, y in window:
                loss = F.cross_entropy(other(x), y)
                (loss / len(window)).backward()
                expected.append(loss.item())
            if clip is not None:
                nn.utils.clip_grad_norm_(other.parameters(), clip)
            optimizers[1].step()
            optimizers[1].zero_grad()
        theirs.step()
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)


def test_flush_without_accumulation_does_nothing() -> None:
    model = network()
    before = copy.deepcopy(model)
    ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1)).flush()
    assert_same_weights(model, before, 0.0)


def test_a_step_of_the_optimizer_within_a_window_is_refused_once() -> None:
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=2, compile=False)
    optimizer.step()  # between two windows it is the user's affair
    step(x, y)
    optimizer.step()
    with pytest.raises(ol.OnelaunchError, match=r"^optimizer.step\(\) was called between the 2 batches [^\n]*flush"):
        step(x, y)
    other = copy.deepcopy(model)
    step(x, y)
    step(x, y)
    F.cross_entropy(other(x), y).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert_same_weights(model, other, WEIGHT_TOLERANCE)


def test_no_step_begins_while_batches_of_another_wait_for_the_optimizer() -> None:
    model, data = network(), batches(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one, two, other = (ol.train_step(model, F.cross_entropy, optimizer, accumulate=n, compile=False) for n in (2, 2, 1))
    one(*data[0])
    before = copy.deepcopy(model)
    two.flush()
    for call in (lambda: two(*data[1]), lambda: other(*data[1])):
        with pytest.raises(
            ol.OnelaunchError, match=r"^another step of this SGD has batches that wait.*: call its flush\(\)"
        ):
            call()
    one(*data[1])
    for x, y in data[:2]:
        (F.cross_entropy(before(x), y) / 2).backward()
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    assert_same_weights(model, before, WEIGHT_TOLERANCE)
    two(*data[2])
    two.flush()
    one(*data[3])
    one = ol.train_step(model, F.cross_entropy, optimizer, accumulate=2, compile=False)
    one(*data[3])  # the batch waited for a step that is gone


def test_the_optimizer_does_not_keep_a_step_alive() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = weakref.ref(ol.train_step(model, F.cross_entropy, optimizer, accumulate=2, compile=False))
    gc.collect()
    assert step() is None
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("scales", [False, True])
def test_after_a_flush_that_failed_nothing_waits(clip: float | None, scales: bool) -> None:
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=3, compile=False, clip_norm=clip, scaler=scaler)
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    step(x, y)
    with pytest.raises(ZeroDivisionError):
        step.flush()
    hook.remove()
    before = copy.deepcopy(model)
    step.flush()
    assert_same_weights(model, before, 0.0)
    assert torch.isfinite(step(x, y))
    step.flush()
    F.cross_entropy(before(x), y).backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(before.parameters(), clip)
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    assert_same_weights(model, before, WEIGHT_TOLERANCE)


def test_a_copy_notices_steps_of_its_optimizer_and_has_no_batches() -> None:
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=2, compile=False)
    step(x, y)
    other = copy.deepcopy(step)
    other(x, y)
    assert_same_weights(other.model, model, 0.0)
    other.optimizer.step()
    with pytest.raises(ol.OnelaunchError, match="between the 2 batches"):
        other(x, y)
    step(x, y)  # the original's window is unbroken


def test_a_flush_after_others_have_stepped() -> None:
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=3, compile=False)
    step(x, y)
    optimizer.step()
    with pytest.raises(ol.OnelaunchError, match=r"^optimizer.step\(\) was called between"):
        step.flush()
    step(x, y)
    optimizer.zero_grad()
    step.flush()  # with no gradients
    step(x, y)
    with torch.inference_mode(), pytest.raises(ol.OnelaunchError, match="inference_mode"):
        step.flush()


def test_an_optimizer_that_wraps_another() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

        param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
        state = property(lambda self: self.inner.state)  # type: ignore[assignment]

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.inner.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.inner.zero_grad(set_to_none)

    model, (x, y) = network(), batches(1)[0]
    before = copy.deepcopy(model)
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=2, compile=False)
    step(x, y)
    step(x, y)
    F.cross_entropy(before(x), y).backward()
    torch.optim.SGD(before.parameters(), lr=0.1).step()
    assert_same_weights(model, before, WEIGHT_TOLERANCE)


def test_steps_are_made_in_one_thread_and_called_in_another() -> None:
    model, (data, *_) = network(), batches(1)

    def make() -> Any:
        return ol.train_step(
            model, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), accumulate=2, compile=False
        )

    step, kept, stop = make(), [], threading.Event()

    def make_many() -> None:
        while not stop.is_set():
            kept.append(make()._window)

    thread, interval = threading.Thread(target=make_many), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(100):
            step(*data)
    finally:
        stop.set()
        thread.join(60)
        sys.setswitchinterval(interval)
    assert kept


class PackedBiases(nn.Module):
    """The gradients of its biases are parts of one tensor, and the second is not aligned to 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8) / 3)
        self.first, self.second = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, torch.cat([self.first, self.second]))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_gradients_that_are_parts_of_one_tensor(device: str) -> None:
    model, data = PackedBiases().to(device), batches(20, device)
    other = copy.deepcopy(model)
    step = ol.train_step(
        model, F.cross_entropy, torch.optim.Adam(model.parameters(), 0.01), accumulate=2, compile=False
    )
    losses = [float(step(x, y)) for x, y in data]
    expected = plain_losses(other, torch.optim.Adam(other.parameters(), 0.01), data, every=2)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
