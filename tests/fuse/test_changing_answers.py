"""Questions whose answer may be another one at the next call: of attributes, children and parameters; and how many plans that
makes."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.placing import regions
from onelaunch.fuse.region import MOST_PLANS, WORTH_A_PLAN
from tests.fuse.compare import assert_same, planned, refusal
from tests.fuse.small_models import Backbone, Layer, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


def test_an_attribute_that_changes_makes_another_plan() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.positive = nn.Linear(12, 12), True

        def forward(self, x: torch.Tensor, scale: float = 1.0, shift: torch.Tensor | None = None) -> torch.Tensor:
            h = self.fc(x)
            h = F.relu(h) if self.positive else torch.tanh(h)
            h = h * scale
            return h if shift is None else h + shift

    model = Switch().double()
    fused = ol.fuse(model)
    for positive in (True, False, True):
        model.positive = fused.positive = positive
        assert_same(model, fused, rows())
        assert_same(model, fused, rows(), 2.0)
        assert_same(model, fused, rows(), 2)
        assert_same(model, fused, rows(), scale=3.0, shift=rows())
    for number in range(40):  # constants that never repeat: no more plans than are allowed
        assert_same(model, fused, rows(), float(number))
    assert len(regions(fused)[0].plans) <= 16


def test_a_child_that_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.0)).double()
    fused = ol.fuse(model)
    fused[1] = nn.Tanh()
    x = rows()
    torch.testing.assert_close(fused(x), torch.tanh(model[0](x)), rtol=0, atol=1e-12)
    fused.append(nn.Sigmoid())
    torch.testing.assert_close(fused(x), torch.sigmoid(torch.tanh(model[0](x))), rtol=0, atol=1e-12)


# What parameters answer, which a later `double()` or `requires_grad_()` changes.


class AsksParameters(Layer):
    def __init__(self, question: Callable[[nn.Module], float]) -> None:
        super().__init__()
        self.question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(next(self.parameters()).dtype)) * self.question(self)


def frozen(model: nn.Module) -> float:
    return 1.0 if all(parameter.requires_grad for parameter in model.parameters()) else 3.0


def counted(model: nn.Module) -> float:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) + 0.5


def precise(model: nn.Module) -> float:
    return 2.0 if next(model.parameters()).dtype.itemsize == 8 else 1.0


@pytest.mark.parametrize("question", [frozen, counted, precise])
def test_answers_of_parameters_are_guarded(question: Callable[[nn.Module], float]) -> None:
    model = AsksParameters(question)
    fused = ol.fuse(model)
    for change in (
        lambda: None,
        lambda: model.fc.requires_grad_(False),
        lambda: fused.double(),
        lambda: fused.requires_grad_(True),
        lambda: model.fc.bias.requires_grad_(False),
        lambda: setattr(model.fc, "weight", nn.Parameter(torch.randn(12, 12))),
    ):
        model.float()
        change()
        x = rows()
        assert planned(fused, x) == ["linear + relu"]
        torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-5)
        assert fused(x).dtype == model(x).dtype
    model.double()
    assert_same(model, fused, rows())


def test_answers_of_the_parameters_of_a_child_that_is_called_as_a_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.fc = nn.Sequential(Backbone("tuple")), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.fc(self.backbone(x)[0])) * frozen(self.backbone)

    model = Whole().double()
    fused = ol.fuse(model)
    assert_same(model, fused, rows())
    for tree in (model, fused):
        new = Backbone("tuple").double().requires_grad_(False)
        new.load_state_dict(fused.backbone[0].state_dict())
        tree.backbone[0] = new  # type: ignore[index]
    x = rows()
    torch.testing.assert_close(fused(x), model(x), rtol=0, atol=1e-12)
    assert planned(fused, x)


@pytest.mark.parametrize("name", ["grad", "data", "_version"])
def test_what_parameters_are_not_asked(name: str) -> None:
    model = AsksParameters(lambda model: 1.0 if getattr(next(model.parameters()), name) is None else 2.0)
    assert f"asks a tensor for its {name}" in refusal(model.double())
    assert ol.fuse(model) is model


# More ways to be called than a region has plans for.


def annealed() -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.5)).double()
    return model, ol.fuse(model)


def test_values_that_never_repeat_are_left_alone_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    _, fused = annealed()
    x = rows()
    with caplog.at_level(logging.WARNING, "onelaunch"):
        for step in range(3 * MOST_PLANS):
            fused[2].p = 0.5 - step / 1000
            fused(x)
    assert [record.message.count("runs unfused") for record in caplog.records] == [1]
    region = regions(fused)[0]
    assert len(region.plans) == MOST_PLANS
    assert region.known_plan(Arguments.of((x,), {})) is None


def test_values_that_repeat_are_fused_however_many_there_were() -> None:
    model, fused = annealed()
    x = rows()
    for step in range(2 * MOST_PLANS):
        fused[2].p = model[2].p = 0.5 - step / 100
        fused(x)
    assert planned(fused, x) == []
    for mode in (True, False):
        fused.train(mode)
        for _ in range(WORTH_A_PLAN):
            fused(x)
        fused(x)
        assert planned(fused, x) == ["linear + relu + dropout"]
    assert len(regions(fused)[0].plans) == MOST_PLANS
    assert_same(model, fused, x)


def test_the_plan_that_goes_is_the_one_that_was_not_used_for_longest() -> None:
    _, fused = annealed()
    x = rows()
    for step in range(MOST_PLANS - 2):
        fused[2].p = 0.5 - (step + 1) / 100
        fused(x)
    region = regions(fused)[0]
    assert len(region.plans) == MOST_PLANS
    fused[2].p = 0.5  # of the first plan
    first = region.plan((x,), {})
    fused[2].p = 0.1
    for _ in range(WORTH_A_PLAN + 2):
        fused(x)
    assert planned(fused, x)
    assert any(plan is first for plan in region.plans)
