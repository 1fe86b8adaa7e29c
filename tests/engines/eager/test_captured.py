"""Which steps of the eager engine may be captured as a graph, and what happens to the others."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.capture import changes
from onelaunch.engines.eager import captured
from onelaunch.engines.eager.captured import CapturedStep
from tests.reference import problem
from tests.step import tape


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


class Average(nn.Linear):
    """A layer that replaces a tensor by another in every call."""

    average = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = self.average * 0.9
        return super().forward(x) * self.average


@pytest.fixture
def on_tapes(tapes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "capturing", tape.capturing)


class Run:
    """A captured step of a model on a tape, and batches for it."""

    def __init__(self, model: nn.Module, loss: Any = F.cross_entropy) -> None:
        self.model, self.loss = model, loss
        self.x, self.y, self.clock = torch.randn(6, 4), torch.randint(2, (6,)), torch.zeros(2, dtype=torch.int64)
        self.out = torch.zeros(())
        self.step = CapturedStep(model, loss, lambda: model.parameters(), self.clock, ())

    def body(self, clock: Tensor) -> None:
        self.out.copy_(self.loss(self.model(self.x), self.y).detach())

    def capture(self) -> None:
        self.step.capture(self.body, (self.x,), self.y)


@pytest.mark.usefixtures("on_tapes")
def test_ordinary_modules_are_captured() -> None:
    run = Run(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).train())
    run.capture()
    assert run.step.is_ready
    assert run.step.reason == ""
    expected = run.loss(run.model(run.x), run.y).detach()
    run.step.replay()
    torch.testing.assert_close(run.out, expected)
    assert run.clock.tolist() == [1, 1]


@pytest.mark.usefixtures("on_tapes")
@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda: random.random(), "what the step depends on is not known: random numbers are drawn on the host"),
        (lambda: time.monotonic(), "what the step depends on is not known: "),
    ],
)
def test_what_dynamo_does_not_know_is_not_captured(read: Any, reason: str) -> None:
    run = Run(nn.Linear(4, 2), lambda output, target: F.cross_entropy(output, target) * read())
    run.capture()
    assert not run.step.is_ready
    assert run.step.reason.startswith(reason)


@pytest.mark.usefixtures("on_tapes")
def test_a_number_that_counts_calls_is_no_reason() -> None:
    run = Run(nn.Sequential(nn.Linear(4, 4), Counts(4, 2)))
    run.model(run.x)
    run.capture()
    assert (run.step.is_ready, run.step.reason) == (False, "")
    run.model(run.x)
    run.capture()
    assert run.step.is_ready


@pytest.mark.usefixtures("on_tapes")
def test_a_tensor_that_forward_replaces_ends_capturing() -> None:
    layer = Average(4, 2)
    run = Run(layer)
    for _ in range(2):
        run.model(run.x)
        before = layer.average
        run.capture()
        assert layer.average is before  # what was captured has not run
    assert run.step.reason == "forward changes model.average in every step"


@pytest.mark.usefixtures("on_tapes")
def test_a_change_drops_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_RECORDINGS", 2)
    state = {"beta": 1.0}
    run = Run(nn.Linear(4, 2), lambda output, target: F.cross_entropy(output, target) * state["beta"])
    run.capture()
    assert not run.step.follow_changes()
    state["beta"] = 0.5
    assert run.step.follow_changes()
    assert (run.step.is_ready, run.step.reason) == (False, "")
    run.capture()
    expected = run.loss(run.model(run.x), run.y).detach()
    run.step.replay()
    torch.testing.assert_close(run.out, expected)
    state["beta"] = 0.25
    assert run.step.follow_changes()
    assert run.step.reason == "state['beta'] changes again and again"


def test_the_plan_says_how_a_step_runs():
    x, y = problem("cross_entropy")
    history = ol.fit(nn.Linear(7, 4), x, y, steps=2, engine="eager", progress=False)
    assert history.plan.endswith("runs the model's operations one by one")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layer", "plan"),
    [
        (nn.Linear, "the step is captured as a CUDA graph and replayed"),
        (Counts, "the step is captured as a CUDA graph and replayed"),
        (Average, "forward changes model[3].average in every step"),
        (ReadsBack, "what the step depends on is not known: "),
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
