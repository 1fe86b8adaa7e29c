"""Inputs by name and in dicts, and models that return their own loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.loops import batches, network, plain_losses

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


class OwnLoss(nn.Module):
    """Returns a dict with its loss, as `transformers` do; inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_models_with_their_own_loss_and_inputs_by_name(device: str) -> None:
    model, data = OwnLoss().to(device), batches(6, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = [lambda x, y: step({"inputs": x, "labels": y}), lambda x, y: step(inputs=x, labels=y), step]
    losses = [float(calls[number % 3](x, y)) for number, (x, y) in enumerate(data)]
    expected = plain_losses(nn.Sequential(other.layer), torch.optim.SGD(other.parameters(), lr=0.1), data)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


class TakesOthers(OwnLoss):
    """As most models of `transformers`: what only `**others` takes, such as a count for the loss, is passed on."""

    def forward(  # type: ignore[override]
        self, inputs: torch.Tensor, labels: torch.Tensor, weight: float = 1.0, **others: Any
    ) -> dict[str, torch.Tensor]:
        output = super().forward(inputs, labels)
        return {**output, "loss": output["loss"] * weight * others.get("scale", 1.0)}


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, batch: dict[str, Any], **others: Any) -> torch.Tensor:
        return F.cross_entropy(self.layer(batch["inputs"]), batch["labels"]) * batch["scale"]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("kind", [TakesOthers, TakesDict])
def test_a_dict_with_a_key_that_only_others_take(kind: type[nn.Module], compile: bool, device: str) -> None:
    model, data = kind().to(device), batches(4, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    losses = [float(step({"inputs": x, "labels": y, "scale": 3.0})) for x, y in data]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    expected = plain_losses(
        nn.Sequential(other.layer), optimizer, data, loss=lambda output, y: F.cross_entropy(output, y) * 3
    )
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


def test_a_dict_that_lacks_an_argument_is_not_passed_by_name() -> None:
    model, (x, y) = TakesOthers(), batches(1)[0]
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ol.OnelaunchError, match=r"forward has no argument 'label'; did you mean 'labels'\?$"):
        step({"inputs": x, "label": y})


class Configured(nn.Module):
    """Like classifiers of `transformers`: the first call sets an attribute, for which Dynamo compiles again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = network(), kind

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            self.kind = "classes"
        return self.inner(x) * weight


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", ["", "classes"])
def test_a_partial_batch_on_a_cpu_compiles_nothing(kind: str, by_name: bool) -> None:
    model = Configured(kind)
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for rows in (12, 12, 5, 7):
        (x, y), weight = batches(1, rows=rows)[0], torch.ones(rows, 1)
        step(x, y, weight=weight) if by_name else step(x, weight, y)
    assert stats["unique_graphs"] == before + (1 if kind else 2)
