"""`ol.train_step` of every module of PyTorch's database, against a plain loop: as a tape, and on a GPU as a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.databases.compare import assert_same
from tests.databases.exceptions import UNRECORDED, parameters
from tests.databases.host_reads import HostReads
from tests.databases.module_cases import Case, cases, copy_of, is_lazy, tensors_of
from tests.step.tape import taped_step

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch warns of settings that it finds unwise
STEPS = 5  # two ordinary ones, a recording that is replayed, and two more replays
MAX_NORM = 1.0  # inputs of up to 9 have gradients of thousands
RATE = 0.1
RATES = {"nn.BCELoss": 1e-3}  # what it takes must stay between 0 and 1, and is 0.01 away from them


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""


class Trained(nn.Module):
    """The mean square of a module's outputs. To each input that has a gradient a parameter is added, so that also modules
    without parameters are trained, and what is learned depends on all gradients.
    """

    def __init__(self, module: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.module = module
        self.shifts = nn.ParameterList(torch.zeros_like(one) for one in tensors_of(inputs) if one.requires_grad)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        shifts = iter(self.shifts)

        def shifted(value: Any) -> Any:
            return value + next(shifts) if isinstance(value, Tensor) and value.requires_grad else value

        args, kwargs = tree_map(shifted, (args, kwargs))
        outputs = [one for one in tensors_of(self.module(*args, **kwargs)) if one.is_floating_point()]
        return torch.stack([one.square().mean() for one in outputs]).sum()


def make(case: Case, device: str) -> tuple[Trained, tuple[Any, ...], dict[str, Any]]:
    module, args, kwargs = case.make(device)
    if is_lazy(module):
        module(*args, **kwargs)
    return Trained(module, (args, kwargs)), args, kwargs


def train(one_step: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """The losses of some steps on the same batch, without the gradients that a caller's inputs would gather."""
    torch.manual_seed(1)
    args, kwargs = copy_of((args, kwargs))
    return torch.stack([one_step(*args, **kwargs).clone() for _ in range(STEPS)])


def assert_follows_a_plain_loop(step: Any, case: Case, other: nn.Module, args: Any, kwargs: Any) -> None:
    """The losses and the weights at the end of `step`, and of a loop that trains `other`."""
    optimizer = optimizer_of(other, case)

    def plain(*args: Any, **kwargs: Any) -> Tensor:
        optimizer.zero_grad()
        loss = other(*args, **kwargs)
        loss.backward()
        nn.utils.clip_grad_norm_(other.parameters(), MAX_NORM)
        optimizer.step()
        return loss.detach()

    losses, expected = train(step, args, kwargs), train(plain, args, kwargs)
    assert_same("losses", [losses], [expected], LOSS_TOLERANCE, 1e-8)
    for (name, one), two in zip(step.model.state_dict().items(), other.state_dict().values(), strict=True):
        assert_same(name, [one], [two], 0, WEIGHT_TOLERANCE)


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATES.get(case.name, RATE))


@pytest.mark.parametrize(("case", "device"), parameters("train", cases()))
def test_training_a_module_follows_a_plain_loop(case: Case, device: str) -> None:
    model, args, kwargs = make(case, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, optimizer_of(model, case), clip_norm=MAX_NORM)
    assert_follows_a_plain_loop(step, case, other, args, kwargs)
    assert not step._plain.compilers_failure
    if device == "cpu" or case.name in UNRECORDED:
        assert step.reason
    elif all(one.numel() for one in tensors_of((args, kwargs))) and not host_reads(other, args, kwargs):
        assert not step.reason  # else it may have one: compiled code need not read what the module reads


@pytest.fixture
def complete_tapes(tapes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inputs without elements are copied too. oneDNN's LSTM returns less where gradients are off, as in a replay."""
    monkeypatch.setattr("onelaunch.capture.recorded.MAX_RING_BYTES", -1)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.mark.parametrize(
    ("case", "device"), parameters("tape", [case for case in cases() if case.name not in UNRECORDED], ("cpu",))
)
def test_a_recording_of_a_module_follows_a_plain_loop(case: Case, device: str, complete_tapes: None) -> None:
    model, args, kwargs = make(case, device)
    other = copy.deepcopy(model)
    step, recordings = taped_step(model, optimizer_of(model, case), None)
    step._plain.clip_norm = MAX_NORM
    assert_follows_a_plain_loop(step, case, other, args, kwargs)
    assert len(recordings) == 1 or host_reads(other, args, kwargs), step.reason


def host_reads(model: nn.Module, args: Any, kwargs: Any) -> set[str]:
    """The names of operations in a step of `model` that cannot be recorded."""
    with HostReads() as reads:
        model(*args, **kwargs).backward()
    return reads.seen
