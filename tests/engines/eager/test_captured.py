"""Which steps of the eager engine may be captured as a graph, and what happens to the others."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.eager.captured import HostState
from tests.reference import problem


class Counts(nn.Linear):
    """A layer whose Python state changes with every call."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class ReadsBack(nn.Linear):
    """A layer that reads a value back from the device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if float(x.detach().abs().sum()) < 0 else 1.0)


def test_ordinary_modules_can_be_captured():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).train()
    x = torch.randn(8, 4)
    state = HostState(model)
    model(x).sum().backward()
    assert state.uncapturable_reason() == ""


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda: random.random(), "Python's random"),
        (lambda: np.random.rand(), "NumPy's random"),  # noqa: NPY002
        (lambda: torch.rand(1), "PyTorch's CPU generator"),
    ],
)
def test_draws_on_the_host_are_noticed(draw, what):
    state = HostState(nn.Linear(2, 2))
    draw()
    assert state.uncapturable_reason() == f"{what} changes from step to step"


def test_attributes_that_change_are_noticed():
    model = nn.Sequential(nn.Linear(4, 4), Counts(4, 2))
    x = torch.randn(3, 4)
    state = HostState(model)
    model(x)
    assert state.uncapturable_reason() == "1.calls changes from step to step"


def test_the_plan_says_how_a_step_runs():
    x, y = problem("cross_entropy")
    history = ol.fit(nn.Linear(7, 4), x, y, steps=2, engine="eager", progress=False)
    assert history.plan.endswith("runs the model's operations one by one")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layer", "plan"),
    [
        (nn.Linear, "the step is captured as a CUDA graph and replayed"),
        (Counts, "changes from step to step"),
        (ReadsBack, "not captured: "),
    ],
)
def test_captured_and_uncaptured_runs_have_the_same_losses(layer, plan):
    x, y = (tensor.cuda() for tensor in problem("cross_entropy"))
    runs = []
    for memory in ("plan", "caching"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 16), nn.GELU(), nn.Dropout(0.2), layer(16, 4)).cuda()
        history = ol.fit(
            model, x, y, epochs=4, batch_size=32, lr=1e-2, optimizer="adam", schedule="cosine", engine="eager",
            memory=memory, progress=False,
        )  # fmt: skip
        runs.append(history)
    assert plan in runs[0].plan
    assert "one by one (memory='caching')" in runs[1].plan
    assert runs[0].losses == runs[1].losses
    assert torch.rand(3, device="cuda").isfinite().all()  # an abandoned capture leaves the generator usable
