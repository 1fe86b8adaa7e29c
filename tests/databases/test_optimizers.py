"""`ol.train_step` with every setting of PyTorch's database of optimizers, against a plain loop: on a GPU as a recorded step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.databases.compare import ATOL, assert_same
from tests.databases.exceptions import marks_of
from tests.databases.optimizer_cases import INFOS, Setting, settings, sparse_settings
from tests.reference import assert_same_course, assert_same_weights
from tests.step.loops import batches, network, plain_losses

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
STEPS = 8  # two ordinary ones, a recording, and more replays of it
NOT_CAPTURABLE = {"Adafactor", "Adagrad", "Muon"}  # PyTorch has no form of them that a CUDA graph can record


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, id=f"{one}-{one.device}", marks=marks_of("optimizer", one, one.device)) for one in settings()],
)
def test_an_optimizer_follows_a_plain_loop(setting: Setting) -> None:
    model, data = network(setting.device), batches(STEPS, setting.device)
    other = copy.deepcopy(model)
    mine, theirs = setting.make(model), setting.make(other)
    step = ol.train_step(model, F.cross_entropy, mine, compile=False)
    if dict(setting.flags).get("differentiable"):  # such a step updates no leaves
        with pytest.raises(RuntimeError, match="leaf Variable"):
            plain_losses(other, theirs, data)
        with pytest.raises(RuntimeError, match="leaf Variable"):
            step(*data[0])
        return
    losses = [float(step(x, y)) for x, y in data]
    assert_same_course(losses, plain_losses(other, theirs, data), LOSS_TOLERANCE)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    assert_same_state(mine, theirs)
    if setting.device == "cpu" or setting.name in NOT_CAPTURABLE:
        assert step.reason
    elif ("foreach", False) not in setting.flags:  # PyTorch's loops over single tensors may read a setting on the host
        assert not step.reason


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", [name for name, info in INFOS.items() if info.step_requires_closure])
def test_an_optimizer_that_needs_a_closure_is_refused(name: str, device: str) -> None:
    model = network(device)
    for each in INFOS[name].optim_inputs_func(device=device):
        optimizer = INFOS[name].optim_cls(model.parameters(), **each.kwargs)
        with pytest.raises(OnelaunchError, match=f"optimizer={name} needs a closure"):
            ol.train_step(model, F.cross_entropy, optimizer)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of Adagrad
@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize(("name", "index"), sparse_settings())
def test_sparse_gradients_are_not_recorded(name: str, index: int, device: str) -> None:
    model = nn.Embedding(10, 4, sparse=True).to(device)
    other = copy.deepcopy(model)
    data = [(torch.randint(10, (12,), device=device), y) for _, y in batches(STEPS, device)]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        info = INFOS[name]
        return info.optim_cls(model.parameters(), **copy.deepcopy(info.optim_inputs_func(device="cpu")[index].kwargs))

    mine, theirs = optimizer(model), optimizer(other)
    step = ol.train_step(model, F.cross_entropy, mine, compile=False)
    assert step.reason
    losses = [float(step(x, y)) for x, y in data]
    assert_same_course(losses, plain_losses(other, theirs, data), LOSS_TOLERANCE)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)


def assert_same_state(mine: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """What the optimizer keeps of each parameter, wherever its step counts are."""
    got, expected = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert got.keys() == expected.keys()
    for index, values in expected.items():
        for name, value in values.items():
            one, two = (torch.as_tensor(each, dtype=torch.float32).cpu() for each in (got[index][name], value))
            size = max(1.0, float(two.abs().max())) if two.numel() else 1.0  # an element's terms may cancel
            assert_same(f"{name} of parameter {index}", [one], [two], atol=ATOL * size)
