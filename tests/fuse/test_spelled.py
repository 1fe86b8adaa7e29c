"""Activations that a model spells out, as an expression: what is one, and what is more than that."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse.spelled import spelled_activation
from tests.fuse.compare import assert_same, capture, fused_names
from tests.fuse.small_models import rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


def switches(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return x * torch.sigmoid(x)


def asks(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) if isinstance(x, torch.Tensor) else x * torch.sigmoid(x)


def gates(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


def overwrites(x: torch.Tensor) -> torch.Tensor:
    x *= torch.sigmoid(x)
    return x


def overwrites_after(x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    x.add_(1)
    return x * gate


calls = 0


def counts(x: torch.Tensor) -> torch.Tensor:
    global calls
    calls += 1
    return x * torch.sigmoid(x)


@torch.no_grad()
def wrapped(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class InForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(x)
        return x * gate


class OverwritesInForward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= torch.sigmoid(x)
        return x


class Applies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Custom.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def calling(function: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    return Calls()


FUNCTIONS = (switches, asks, gates, overwrites, overwrites_after, counts, wrapped)
ODD: dict[str, Callable[[], nn.Module]] = {kind.__name__: kind for kind in (InForward, OverwritesInForward, Applies)}
ODD |= {function.__name__: partial(calling, function) for function in FUNCTIONS}


class Around(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.fc, self.last, self.activation = nn.Linear(12, 12), nn.Linear(12, 12), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x) * 1
        return self.activation(h) + h + torch.tanh(self.last(x))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_more_than_an_expression_is_not_an_activation(name: str, gradients: bool) -> None:
    activation = ODD[name]()
    before = calls
    with torch.set_grad_enabled(gradients):
        assert spelled_activation(activation) is None
    assert calls == before


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does
@pytest.mark.parametrize("kind", [InForward, OverwritesInForward, Applies])
def test_gradients_and_values_of_odd_activations(kind: type[nn.Module]) -> None:
    model, x = Around(kind()).double(), rows()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + tanh"]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    if kind is not OverwritesInForward:  # which PyTorch cannot differentiate
        wanted, got = (torch.autograd.grad(module(x).sum(), list(model.parameters())) for module in (model, fused))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        compiled, _, _ = capture(model, x)
        got = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def sigmoid_times(x: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Method(nn.Module):
    """As transformers writes its gelu where it is asked for in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.act = self.written_out

    def written_out(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


def test_plain_expressions_are_still_activations() -> None:
    model = nn.Sequential(nn.Linear(12, 12), calling(sigmoid_times), nn.Linear(12, 12), Method()).double()
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + silu (spelled out)", "linear + gelu (spelled out)"]
    assert_same(model, fused, rows())


def test_replaced_forward_of_a_spelled_activation_counts() -> None:
    model = nn.Sequential(nn.Linear(12, 12), Method(), nn.Linear(12, 12), nn.Tanh()).double()
    model[1].forward = torch.cos  # type: ignore[assignment]
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + tanh"]
    assert_same(model, fused, rows())


def test_spelled_activation_of_whole_numbers() -> None:
    model = nn.Sequential(calling(sigmoid_times), nn.Linear(12, 12), nn.Tanh())
    fused = ol.fuse(model)
    assert "silu (spelled out)" in fused_names(fused, True)
    x = torch.randint(-5, 5, (9, 12))
    torch.testing.assert_close(fused(x), model(x))
