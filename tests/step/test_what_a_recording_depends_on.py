"""Changes between the calls of a recorded step: flags, settings and memory of the model, kinds of inputs, `torch.autocast`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.capture import changes
from onelaunch.capture.model_state import ModelState
from onelaunch.step.recordings import MAX_PENDING, MAX_VARIANTS
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.changes import CHANGES, network
from tests.step.loops import batches, plain_losses
from tests.step.tape import taped_step

pytestmark = pytest.mark.usefixtures("no_code")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", [*CHANGES.values(), lambda model: model[0].requires_grad_(True)], ids=[*CHANGES, "unfreeze"]
)
def test_a_change_between_replays_counts(request: pytest.FixtureRequest, change: Callable[[Any], Any]) -> None:
    model = network(frozen="unfreeze" in request.node.name).cuda()
    other, data, losses, expected = copy.deepcopy(model), batches(14, "cuda"), [], []
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.2))
    theirs = torch.optim.SGD(other.parameters(), lr=0.2)
    for number, (x, y) in enumerate(data):
        if number == 7:
            assert len(step._recordings) == 1
            change(model)
            change(other)
        losses.append(step(x, y))
        theirs.zero_grad()
        loss = F.cross_entropy(other(x), y)
        loss.backward()
        theirs.step()
        expected.append(loss.detach())
    assert step.reason == ""
    assert_same_course(torch.stack(losses).tolist(), torch.stack(expected).tolist(), LOSS_TOLERANCE * 10)


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "name", [name for name in CHANGES if name != "an attribute of a linear layer"]
)  # it reads none
def test_a_change_makes_another_recording(name: str, compile: bool) -> None:
    model, (data, *_) = network(), batches(1, "cpu")
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    for _ in range(4):
        step(*data)
    (first,) = recordings.all()
    before = first.replays
    CHANGES[name](model)
    for _ in range(4):
        step(*data)
    assert first.replays == before
    assert recordings.all()[0] is not first
    assert step.reason == ""


def set_factor(model: Any, number: int) -> None:
    model[3].factor = 1.0 - number / 2


def freeze(model: Any, number: int) -> None:
    """As in the training of two networks by turns."""
    model[0].requires_grad_(number == 0)


def evaluate(model: Any, number: int) -> None:
    model[1].train(number == 0)


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("change", [set_factor, freeze, evaluate])
def test_what_comes_back_finds_its_recording(change: Callable[[Any, int], None]) -> None:
    model, (data, *_) = network(), batches(1, "cpu")
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        for number in range(2):
            change(model, number)
            for _ in range(4):
                step(*data)
    assert sorted(one.replays for one in recordings.all()) == [2 + 4 + 4] * 2
    assert step.reason == ""


@pytest.mark.usefixtures("tapes")
def test_few_of_many_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MANY_REPLAYS", 1)
    model, (data, *_) = network(), batches(1, "cpu")
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in range(MAX_VARIANTS + 2):
        model[3].factor = 1 / (1 + factor)
        for _ in range(4):
            step(*data)
    assert len(recordings) == MAX_VARIANTS
    assert step.reason == ""


@pytest.mark.usefixtures("tapes")
def test_a_setting_that_always_changes_is_named() -> None:
    model, (data, *_) = network(), batches(1, "cpu")
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for number in range(16):
        if number % 4 == 3:
            model[3].factor = 1 / (1 + number)
        step(*data)
    assert step.reason == "model[3].factor (a tensor may change, by fill_ or copy_) changes again and again"
    assert len(recordings) == 0
    del model[3].factor  # of the instance: the class has another
    step(*data)


def gradient_node(parameter: Tensor) -> Any:
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_a_new_gradient_node_changes_nothing_else(dtype: torch.dtype) -> None:
    frozen, parameter = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(4, 3, dtype=dtype).T)
    calls: list[str] = []
    parameter.register_hook(lambda gradient: calls.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda tensor: calls.append("after"))
    state = ModelState([], lambda: [frozen, parameter])
    output = (parameter * 2).abs().sum()  # it keeps the node
    gradient_node(parameter).metadata["old"] = True
    parameter.grad = torch.ones_like(parameter)
    before = parameter.data_ptr(), parameter.stride(), parameter._version
    state.renew_gradient_nodes()
    assert "old" not in gradient_node(parameter).metadata
    assert before == (parameter.data_ptr(), parameter.stride(), parameter._version)
    output.backward()
    parameter.abs().sum().backward()
    assert calls == ["hook", "after"] * 2
    torch.testing.assert_close(parameter.grad, torch.full((3, 4), 4, dtype=dtype))


def test_parameters_without_a_kept_node_are_left_alone() -> None:
    """Another thread may read them."""

    kept, released = (nn.Parameter(torch.ones(3)) for _ in range(2))
    state = ModelState([], lambda: [kept, released])
    output = kept * released.sum().item()
    changed = []

    def empty(*size: int, **options: Any) -> Tensor:
        changed.append(options)
        return torch.zeros(*size, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        state.renew_gradient_nodes()
        assert len(changed) == 1
        output.sum().backward()
        state.renew_gradient_nodes()
        assert len(changed) == 1


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Any, beta: float = 1.0) -> Tensor:
        return self.layer(x if isinstance(x, Tensor) else x.x) * beta


@pytest.mark.usefixtures("tapes")
def test_numbers_that_always_change_keep_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    model = Times()
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, "onelaunch"):
        for number in range(MAX_PENDING + 9):
            step(torch.randn(5, 8), torch.randint(4, (5,)), beta=number / 100)
    assert len(recordings._pending) == MAX_PENDING
    assert sum("pass a number that changes" in record.getMessage() for record in caplog.records) == 1


@dataclass
class Batch:  # it has no hash
    x: Tensor


@pytest.mark.usefixtures("tapes")
def test_objects_with_tensors_inside_are_not_recorded() -> None:
    """A recording would read the tensors of the first."""
    model = Times()
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        step(Batch(torch.randn(5, 8)), torch.randint(4, (5,)))
    assert step.reason.startswith("an argument is a Batch: pass its tensors")
    assert not recordings._pending


def test_an_object_may_hold_the_input_and_the_target() -> None:
    batch = Batch(torch.randn(5, 8))
    model = Times()
    step = ol.train_step(model, lambda y, batch: y.sum() + batch.x.sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    expected = model(batch).sum() + batch.x.sum()
    torch.testing.assert_close(step(batch, batch), expected.detach())


def test_compiled_steps_keep_no_batches() -> None:
    model = Times()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(Batch(torch.randn(5, 8)), torch.randint(4, (5,)))
    assert len(step._plain._compiled) == 1


@pytest.mark.usefixtures("tapes")
def test_autocast_around_the_call_counts() -> None:
    model = network()
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.0))
    (data, *_) = batches(1, "cpu")
    losses = []
    for _ in range(6):
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(float(step(*data)))
        losses.append(float(step(*data)))
    assert len(recordings) == 2
    assert step.reason == ""
    assert len(set(losses[0::2])) == len(set(losses[1::2])) == 1
    assert losses[0] != losses[1]


class HardOrSoft:
    """A loss that reads other settings for other kinds of targets."""

    hard = soft = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (self.soft if target.dim() == 2 else self.hard)


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("compile", [False, True])
def test_kinds_of_inputs_depend_on_what_each_reads(compile: bool) -> None:
    model, loss = network(), HardOrSoft()
    plain = copy.deepcopy(model)
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, compile=compile)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    (x, y), losses, expected = batches(1, "cpu")[0], [], []
    for number in range(15):
        target = y if number < 5 else F.one_hot(y, 4).float()
        if number == 10:
            assert len(recordings) == 2
            loss.soft = 0.25
        losses.append(float(step(x, target)))
        expected += plain_losses(plain, optimizer, [(x, target)], loss=loss)
    assert_same_course(losses, expected, LOSS_TOLERANCE)


def scaled_gradients(optimizer: torch.optim.Optimizer) -> None:
    def scale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.1)

    optimizer.register_step_pre_hook(scale)


def state_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """As by a program that moves the state to the host and back."""
    for state in optimizer.state.values():
        state["momentum_buffer"].data = torch.zeros_like(state["momentum_buffer"])


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("change", [scaled_gradients, state_elsewhere])
def test_changes_of_an_optimizer_count(change: Callable[[Any], None]) -> None:
    model = network()
    plain, data, losses, expected = copy.deepcopy(model), batches(14, "cpu"), [], []
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, plain))
    step, _ = taped_step(model, mine)
    for number, (x, y) in enumerate(data):
        if number == 6:
            change(mine)
            change(theirs)
        losses.append(float(step(x, y)))
        expected += plain_losses(plain, theirs, [(x, y)])
    assert step.reason == ""
    assert_same_course(losses, expected, LOSS_TOLERANCE)


class MaxNorm(nn.Linear):
    """It gives its weight other memory in every call."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


@pytest.mark.usefixtures("tapes")
def test_ctrl_c_during_a_recording_leaves_the_weights_where_they_were() -> None:
    from tests.step.tape import is_recording

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if is_recording():
            raise KeyboardInterrupt
        return F.cross_entropy(output, target)

    torch.manual_seed(0)
    model = nn.Sequential(MaxNorm(8, 8), nn.Linear(8, 4))
    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    for _ in range(2):
        step(x, y)
    address = model[0].weight.data_ptr()
    with pytest.raises(KeyboardInterrupt):
        step(x, y)
    assert model[0].weight.data_ptr() == address
