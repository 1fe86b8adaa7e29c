"""Forwards that a trace must not be believed for: they are refused, with the reason, and run as they were."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as checkpointing

import onelaunch as ol
from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.placing import regions
from onelaunch.fuse.tracing import RefusedError, trace
from tests.fuse.compare import assert_same, fused_names
from tests.fuse.small_models import rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")
renamed = checkpointing.checkpoint


class Untraceable(nn.Module):
    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self, body: Callable[[Untraceable, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(12, 12), nn.Parameter(torch.ones(12))
        self.calls = 0
        self.kept: list[torch.Tensor] = []
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("steps", torch.zeros(()))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, F.relu(self.fc(x)))


def branches(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def asks_type(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x if torch.is_tensor(x) else x[0]


def draws(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(12, dtype=torch.float64)


def draws_in_numpy(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())  # noqa: NPY002


def draws_in_python(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def counts(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return x


def keeps(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.kept.append(x)
    return x


def replaces_a_buffer(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean + x.detach().mean(0)
    return x - m.mean


def counts_in_a_buffer(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return x * m.steps


def without_grad(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return x + y


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (branches, "control flow"),
        (draws, "makes a tensor of its own"),
        (draws_in_python, "draws random numbers"),
        (draws_in_numpy, "draws random numbers"),
        (counts, "changes its attribute calls"),
        (keeps, "changes its attribute kept"),
        (replaces_a_buffer, "replaces its buffers"),
        (counts_in_a_buffer, "replaces its buffers"),
        (without_grad, "enters no_grad"),
    ],
)
def test_refused_forward(body: Callable[[Untraceable, torch.Tensor], torch.Tensor], reason: str) -> None:
    model = Untraceable(body).double()
    with pytest.raises(RefusedError, match=reason):
        trace(model, Arguments.required_by(Untraceable.forward))
    assert model.calls == 0
    assert model.kept == []
    assert all(isinstance(buffer, torch.Tensor) for buffer in model.buffers())
    outer = nn.Sequential(model, nn.Linear(12, 12), nn.Tanh()).double()
    fused = ol.fuse(outer)
    assert fused_names(fused, True) == ["linear + tanh"]
    if body not in (draws, draws_in_numpy, draws_in_python):
        assert_same(outer, fused, rows())


def test_a_forward_that_asks_for_types_is_left_alone() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
            x = x if isinstance(x, torch.Tensor) else x[0]
            return F.relu(self.fc(x))

    model = Asks().double()
    assert ol.fuse(model) is model
    with pytest.raises(RefusedError, match="calls isinstance"):
        trace(model, Arguments.required_by(Asks.forward))


class Contexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(12, 12), nn.ReLU()), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.helped(x)))

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Checkpointed(Contexts):
    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.inner, x, use_reentrant=False)


class Hidden(Contexts):
    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return renamed(self.inner, x, use_reentrant=False)


class InFloat(Contexts):
    def helped(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Checkpointed, "calls checkpoint"),
        (InFloat, "calls autocast"),
        (Hidden, "or a checkpoint|makes a tensor of its own"),
    ],
)
def test_contexts_that_a_graph_does_not_record(kind: type[Contexts], reason: str) -> None:
    assert len(regions(ol.fuse(Contexts()))) == 2
    model = kind().double()
    fused = ol.fuse(model)
    assert [region.path for region in regions(fused)] == ["inner"]
    assert_same(model, fused, rows())
    with pytest.raises(RefusedError, match=reason):
        trace(model, Arguments.required_by(kind.forward))
