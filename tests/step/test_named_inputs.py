"""Inputs by name and in dicts, and models that return their own loss."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.step.inputs import forward_arguments, passed_by_name, signature
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


class Forwards:
    """Each takes a tensor; whether {"x": tensor, …} goes to it by name depends on its arguments."""

    def plain(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x

    def positional(self, x: torch.Tensor, /, **others: Any) -> torch.Tensor:
        return x

    def keyword(self, *, x: torch.Tensor, **others: Any) -> torch.Tensor:
        return x

    def only_others(self, **others: torch.Tensor) -> torch.Tensor:
        return others["x"]

    def several(self, *args: Any, **others: Any) -> torch.Tensor:
        return args[0]

    def target(self, x: torch.Tensor, y: torch.Tensor, **others: Any) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("forward", "keys", "others", "by_name"),
    [
        ("plain", ("x",), (), True), ("plain", ("x", "other"), (), False), ("positional", ("x",), (), False),
        ("positional", ("x", "other"), (), False), ("keyword", ("x", "other"), (), True), ("keyword", ("other",), (), False),
        ("only_others", ("x", "other"), (), True), ("several", ("x",), (), False), ("target", ("x", "other"), (), False),
        ("target", ("x", "other"), ("y",), True), ("target", ("x", "y", 1), (), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("wrap", [lambda model: model, torch.compile, nn.DataParallel])
def test_which_dicts_go_by_name(
    forward: str, keys: tuple[Any, ...], others: tuple[str, ...], by_name: bool, wrap: Callable[[Any], Any]
) -> None:
    model = nn.Linear(2, 2)
    model.forward = getattr(Forwards(), forward)
    batch = dict.fromkeys(keys, torch.zeros(2))
    for given in (batch, UserDict(batch)):
        assert passed_by_name((given,), forward_arguments(wrap(model)), dict.fromkeys(others)) == by_name


def test_a_scripted_model_takes_no_names() -> None:
    assert not passed_by_name(
        ({"input": torch.zeros(2)},), forward_arguments(torch.jit.trace(nn.Tanh(), torch.zeros(2)))
    )


def test_equal_values_of_different_types_are_different_kinds_of_inputs() -> None:
    assert len({signature(value) for value in (0, False, 0.0)}) == 3
    assert signature(torch.eye(2)) != signature(torch.eye(2).to_sparse())


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
