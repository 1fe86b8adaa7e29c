"""What a trace rests on: what changes afterwards makes another plan, what a graph cannot say is refused, others are let be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse.placing import regions
from tests.fuse.compare import assert_same
from tests.fuse.test_spelled import Custom, gates

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")
WIDE = 6


def rows() -> torch.Tensor:
    return torch.randn(5, WIDE, dtype=torch.float64)


def layer(**options: bool) -> nn.Linear:
    return nn.Linear(WIDE, WIDE, dtype=torch.float64, **options)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = layer()


class Scaled(Base):
    _scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.zero = 0.0

    def forward(self, x: torch.Tensor, zero: float | None = None, factor: float = 1.0) -> torch.Tensor:
        signed = torch.copysign(F.relu(self.fc(x)), self.zero if zero is None else zero)
        return signed * self._scale * factor * getattr(self, "_late", 1.0)


def test_a_trace_leaves_the_calls_of_other_threads_alone() -> None:
    plain, x = nn.Sequential(layer(), nn.Tanh()), rows()
    expected, errors, stop = plain(x), [], threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                assert torch.equal(plain(x), expected)
            except Exception as error:
                errors.append(repr(error))

    other = threading.Thread(target=work)
    other.start()
    try:
        for _ in range(10):
            ol.fuse(Scaled())(x, 0.0)
    finally:
        stop.set()
        other.join()
    assert not errors


def test_first_calls_of_one_model_in_several_threads() -> None:
    model, x, errors = Scaled(), rows(), []
    fused = ol.fuse(model)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for factor in range(10):
            try:
                assert torch.equal(fused(x, None, float(factor)), model(x, None, float(factor)))
            except Exception as error:
                errors.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    kinds = [plan.arguments for plan in regions(fused)[0].plans if len(plan.arguments.positional) == 3]
    assert len(kinds) == len(set(kinds)) == 10


class Masked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(x))
        return h if self.mask is None else h * self.mask


def test_a_bias_or_buffer_set_later_and_taken_away() -> None:
    bare = nn.Sequential(layer(bias=False), nn.ReLU())
    fused_bare = ol.fuse(bare)
    fused_bare(rows())
    fused_bare[0].bias = nn.Parameter(torch.ones(WIDE, dtype=torch.float64))
    assert_same(bare, fused_bare, rows())
    fused_bare[0].bias = None
    assert_same(bare, fused_bare, rows())
    masked = Masked()
    fused = ol.fuse(masked)
    for mask in (rows()[0], None, rows()[1]):
        fused.mask = mask
        assert_same(masked, fused, rows())


def test_class_weights_set_later() -> None:
    class Loss(Base):
        def __init__(self) -> None:
            super().__init__()
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.loss(self.fc(x), target)

    model, target = Loss(), torch.randint(WIDE, (5,))
    fused = ol.fuse(model)
    fused(rows(), target)
    fused.loss.weight = torch.rand(WIDE, dtype=torch.float64)
    assert_same(model, fused, rows(), target)


def test_tied_weights_that_come_apart() -> None:
    class Tied(Base):
        def __init__(self) -> None:
            super().__init__()
            self.out = layer()
            self.out.weight = self.fc.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(F.linear(self.fc(x), self.out.weight))

    model = Tied()
    fused = ol.fuse(model)
    fused(rows())
    fused.out.weight = nn.Parameter(torch.randn(WIDE, WIDE, dtype=torch.float64))
    assert_same(model, fused, rows())


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Holding(nn.Module):
    """Modules in containers that are themselves never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])
        self.named = nn.ModuleDict({"a": layer(), "b": layer()})
        self.space = nn.Module()
        self.space.last, self.space.scale = layer(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.layers:
            x = F.relu(inner(x))
        for name, inner in self.named.items():
            x = torch.tanh(inner(x)) * (2 if name == "a" else 1)
        return F.relu(self.space.last(x)) * self.space.scale * (1 if self.layers.training else 3)


def _renamed(model: Holding, new: nn.Module) -> None:
    model.named["c"] = model.named.pop("a")


@pytest.mark.parametrize(
    "change",
    [
        lambda m, new: m.layers.append(new),
        lambda m, new: m.layers.__setitem__(0, new),
        lambda m, new: m.layers.__delitem__(-1),
        lambda m, new: setattr(m.space, "last", new),
        lambda m, new: setattr(m.space, "scale", 0.5),
        lambda m, new: setattr(m.space.last, "__class__", Doubled),
        lambda m, new: setattr(m.layers, "training", False),
        _renamed,
    ],
)
def test_a_change_in_a_container_that_is_not_called(change: Callable[[Holding, nn.Module], object]) -> None:
    model, new = Holding(), Doubled(WIDE, WIDE, dtype=torch.float64)
    fused, x = ol.fuse(model), rows()
    fused(x)
    change(model, new)
    change(fused, new)
    assert torch.allclose(model(x), fused(x), rtol=0, atol=1e-12)


def test_an_attribute_over_the_class_s_own_and_one_that_appears() -> None:
    model = Scaled()
    fused, x = ol.fuse(model), rows()
    for name, value in (("_scale", 2.0), ("_late", 3.0), ("zero", -0.0)):
        fused(x)
        setattr(model, name, value)
        setattr(fused, name, value)
        assert torch.equal(torch.signbit(model(x)), torch.signbit(fused(x))), name
        assert torch.equal(model(x), fused(x)), name


def test_minus_zero_is_another_argument_than_zero() -> None:
    model, x = Scaled(), rows()
    fused = ol.fuse(model)
    for zero in (0.0, -0.0):
        assert torch.equal(torch.signbit(model(x, zero)), torch.signbit(fused(x, zero)))


class Gated(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gates(F.relu(self.fc(x)))


class OwnBackward(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Custom.apply(F.relu(self.fc(x)))  # type: ignore[no-any-return]


class AsksForGradients(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.fc(x))
        return y if torch.is_grad_enabled() else y * 2


@pytest.mark.parametrize("kind", [Gated, OwnBackward, AsksForGradients])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_where_a_model_is_fused_does_not_matter(kind: type[Base], context: Any) -> None:
    model, x = kind(), rows()
    with context():
        fused = ol.fuse(model)
    assert_same(model, fused, x)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
