"""Changes between the calls of a recorded step: flags, settings and memory of the model, kinds of inputs, `torch.autocast`."""

from __future__ import annotations

import contextlib
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
from onelaunch.step.model_state import ModelState
from onelaunch.step.recordings import MAX_PENDING, Recordings
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.changes import CHANGES, network
from tests.step.loops import batches

pytestmark = pytest.mark.usefixtures("no_code")


IN_ANOTHER_RECORDING = ("freeze", "evaluate a layer")  # the one before can be replayed again


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


class Replayed:
    """Stands for a recorded step on a CPU, and runs it."""

    def __init__(self, step: Any, flags: list[bool], ring: Any) -> None:
        self.step, self.flags, self.ring, self.replays = step, flags, ring, 0

    def replay(self, tensors: list[Tensor]) -> Tensor:
        self.replays += 1
        return self.step(tuple(tensors), {}, True)

    def replay_in_place(self, ring: Any, tensors: list[Tensor]) -> Tensor:
        return self.replay(tensors)


class Ring:
    """It takes all arguments, so that the fast way replays."""

    def takes(self, args: Any) -> bool:
        return True


def recorded_step(model: nn.Module, loss: Any = F.cross_entropy, ring: Any = None) -> tuple[Any, Any]:
    """A step whose recordings are stand-ins, and its recordings."""
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    recordings: Any = Recordings(step._plain, step._capturable, "")
    recordings._record = lambda pending, update: Replayed(step._plain, recordings.state.flags(), ring)
    recordings._own_stream = contextlib.nullcontext
    step._recordings = recordings
    return step, recordings


@pytest.mark.parametrize("ring", [None, Ring()], ids=["slow", "fast"])
@pytest.mark.parametrize(
    "name", [name for name in CHANGES if name != "a pruned layer"]
)  # a stand-in runs its hook always
def test_a_change_makes_another_recording(name: str, ring: Any) -> None:
    model, (data, *_) = network(), batches(1, "cpu")
    step, recordings = recorded_step(model, ring=ring)
    for _ in range(4):
        step(*data)
    assert len(recordings) == 1
    (first,) = recordings._recorded.values()
    before = first.replays
    CHANGES[name](model)
    for _ in range(4):
        step(*data)
    assert first.replays == before
    assert len(recordings) == (2 if name in IN_ANOTHER_RECORDING else 1)
    assert step.reason == ""
    if name in IN_ANOTHER_RECORDING:
        model[0].requires_grad_(True)
        model.train()
        step(*data)
        assert first.replays == before + 1


def test_other_batch_sizes_and_what_forward_sets_itself_change_nothing() -> None:
    model = network()
    step, recordings = recorded_step(model)
    for rows in (5, 7, 5, 7, 5, 7, 5, 7):
        step(torch.randn(rows, 8), torch.randint(4, (rows,)))
    model(torch.randn(11, 8))  # an evaluation, in which it sets `calls`
    model[3].factor = float("1.0")  # an equal number
    step(torch.randn(5, 8), torch.randint(4, (5,)))
    assert [one.replays for one in recordings._recorded.values()] == [3, 2]
    assert step.reason == ""


def test_a_setting_that_always_changes_is_named() -> None:
    model, (data, *_) = network(), batches(1, "cpu")
    step, recordings = recorded_step(model)
    for number in range(10):
        model[3].factor = 1 / (1 + number)
        step(*data)
    assert step.reason == "Scale.factor (a tensor may change, by fill_ or copy_) changes again and again"
    assert len(recordings) == 0
    del model[3].factor  # of the instance: the class has another
    step(*data)


def test_a_deleted_setting_is_a_change() -> None:
    model = network()
    state = ModelState([model, None], model.parameters)
    assert state.is_same()
    del model[3].factor
    assert not state.is_same()
    assert state.change(recorded=True) == "Scale.factor"
    assert state.change(recorded=True) == ""


class ModeElsewhere(nn.Module):
    """Like modules compiled by `torch.jit.script`, it has no attribute `training` of its own."""

    @property
    def training(self) -> bool:
        return bool(vars(self)["mode"])

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self)["mode"] = mode


def test_a_mode_that_is_no_attribute_of_the_module_is_a_flag() -> None:
    module = ModeElsewhere()
    state = ModelState([nn.Sequential(module, nn.ReLU())], list)
    before = state.flags()
    module.eval()
    assert state.flags() != before
    module.train()
    assert state.flags() == before


def test_parameters_without_memory_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    state = ModelState([model], model.parameters)
    assert state.is_same()
    model(torch.randn(3, 8))
    assert state.change(recorded=True) != ""


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
    assert state.is_same()
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


def test_numbers_that_always_change_keep_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    step, recordings = recorded_step(Times())
    with caplog.at_level(logging.WARNING, "onelaunch"):
        for number in range(MAX_PENDING + 9):
            step(torch.randn(5, 8), torch.randint(4, (5,)), beta=number / 100)
    assert len(recordings._pending) == MAX_PENDING
    assert sum("pass a number that changes" in record.getMessage() for record in caplog.records) == 1


@dataclass
class Batch:  # it has no hash
    x: Tensor


def test_objects_with_tensors_inside_are_not_recorded() -> None:
    """A recording would read the tensors of the first."""
    step, recordings = recorded_step(Times())
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


def test_autocast_around_the_call_counts() -> None:
    seen: list[torch.dtype] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.dtype)
        return F.cross_entropy(output.float(), target)

    step, recordings = recorded_step(network(), loss, Ring())
    (data, *_) = batches(1, "cpu")
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            step(*data)
        step(*data)
    assert seen == [torch.bfloat16, torch.float32] * 4
    assert len(recordings) == 2
