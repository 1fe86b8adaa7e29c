"""Steps that cannot be compiled: what they changed before that was noticed is undone, and they run as PyTorch operations."""

from __future__ import annotations

import copy
import random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import lookup_backend

import onelaunch as ol
from onelaunch.fuse import backend
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights
from tests.step.loops import batches, network, plain_losses


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


def test_compiling_for_a_cpu_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, data = network(), batches(2)
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, *others: gm.forward)
    for options in ({}, {"compile": False}):
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for x, y in data:
            step(x, y)
    messages = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert len(messages) == 1
    assert messages[0].startswith(
        "train_step: compiling the step for the CPU takes 10 s or more, minutes for a large model"
    )
    assert messages[0].endswith("compile=False starts at once")


def test_where_the_compiler_fails_steps_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a file in Inductor's cache that was cut short when a process was killed."""

    def fails(*_: Any) -> Any:
        raise ImportError("main.so: file too short")

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", fails)
    model, data = network(), batches(3)
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(x, y)) for x, y in data]
    assert_same_course(losses, plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data), LOSS_TOLERANCE)
    messages = [record.getMessage() for record in caplog.records if "compiler failed" in record.getMessage()]
    assert len(messages) == 1
    assert "file too short" in messages[0]


def test_what_a_step_changed_before_the_compiler_failed_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the loss, its inputs, and generators other than PyTorch's."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.generator = torch.Generator().manual_seed(1)
            self.calls = 0

        def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(y.detach().mean())
            self.calls += 1
            target.div_(2)
            drawn = random.random() + np.random.rand() + torch.rand((), generator=self.generator)  # noqa: NPY002
            return (y[:, 0] - target).square().mean() * drawn + self.mean

    def course(compile: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model, loss, target = network(), Loss(), torch.ones(12)
        step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
        if compile:
            plain, forward = step._plain, step._plain._forward_and_loss

            def fails_late(*given: Any) -> Any:
                forward(*given)
                raise torch._dynamo.exc.InternalTorchDynamoError("late")

            monkeypatch.setitem(plain.candidates._functions, 0, fails_late)
        losses = [float(step(torch.ones(12, 8), target)) for _ in range(3)]
        return losses, float(loss.mean), loss.calls, target.tolist()

    assert course(True) == course(False)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo's look at values between two graphs
def test_a_loss_of_gradients_is_not_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As of physics-informed networks, and gradient penalties: compiled code is not differentiated twice.

    What the step did before that was noticed is undone: statistics, random numbers, and the window's earlier gradients stay.
    """

    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor, penalised: bool) -> torch.Tensor:
            x = x.detach().requires_grad_()
            u = self.body(x)
            if not penalised:
                return (u**2).mean()
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return ((slope - u) ** 2).mean()

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    model, x = Physics(), torch.rand(16, 1)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.01), accumulate=2)
    torch.manual_seed(3)
    losses = [float(step(x, penalised)) for penalised in (False, True, False, True)]
    optimizer, expected = torch.optim.SGD(other.parameters(), lr=0.01), []
    torch.manual_seed(3)
    for penalised in (False, True, False, True):
        loss = other(x, penalised)
        (loss / 2).backward()
        if penalised:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    assert sum("the loss depends on gradients" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("derivatives", [1, 2])
def test_a_loss_function_that_differentiates_by_the_inputs_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, derivatives: int, training: bool
) -> None:
    """The input is also the target, as in step(x, x)."""

    def loss(u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        slope = u
        for _ in range(derivatives):
            (slope,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return ((slope - u) ** 2).mean()

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    model, x = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).train(training), torch.rand(16, 1)
    other, data = copy.deepcopy(model), [(x.requires_grad_(), x)] * 3
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(*batch)) for batch in data]
    expected = []
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for one, two in data:
        value = loss(other(one), two)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE)
    assert repr(step).endswith("; not compiled: the loss depends on gradients, which it does not differentiate)")


@pytest.mark.parametrize("call", [1, 2])
def test_errors_of_the_model_itself_pass_whatever_an_uncompiled_trial_would_do(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    class Stop(Exception):
        pass

    class Stops(nn.Linear):
        calls: ClassVar[list[int]] = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            if self.calls[0] == call:
                raise Stop
            return super().forward(x)

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    Stops.calls[0] = 0
    model, (x, y) = Stops(8, 4), batches(1)[0]
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(call - 1):
        step(x, y)
    with pytest.raises(Stop):
        step(x, y)
    assert "not compiled" not in repr(step)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_step_that_is_undone_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.calls = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), 0
            self.count: torch.Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.count = self.count + 1
            return self.body(x)

    def loss(u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0].square().mean()

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    model, x = Counts(), torch.rand(16, 1, requires_grad=True)
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(x, x)
    step(x, x)
    assert "not compiled" in repr(step)
    assert (model.calls, float(model.count)) == (2, 2.0)


def test_a_step_that_is_compiled_again_and_again_says_so() -> None:
    terms: list[float] = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) + sum(terms) * output.mean()

    model = nn.Linear(6, 3)
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(4, 6), torch.randint(3, (4,))
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        assert "its limit" not in step.reason or len(terms) >= torch._dynamo.config.recompile_limit
        step(x, y)
        terms.append(0.01)
    assert "8 forms, its limit" in step.reason
