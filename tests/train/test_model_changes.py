"""What counts as a change of a model, and that a session's own weights do not replace it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.train.inputs import make_run
from onelaunch.train.model_changes import ModelBefore, same_bits
from tests.train.acting_callbacks import CHANGES, data, network


def run_of(model: nn.Module) -> Run:
    x, y = data()
    return make_run(model, x, y, None, {"epochs": 1})


NAMES = {
    "halve": "the values of 0.weight", "halve_data": "the values of 3.weight",
    "zero_in_other_memory": "the values of 6.weight", "freeze": "requires_grad of 0.weight", "drop_more": "2.p",
    "another_activation": "layer '1'", "another_layer": "3.weight for another tensor",
    "another_parameter": "0.weight for another tensor", "wider": "0.weight for another tensor",
    "hook": "the hooks of layer '1'", "larger_eps": "4.eps", "class_of_a_layer": "1.type",
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_has_a_name(name):
    model = network()
    before = ModelBefore(run_of(model), values=True)
    assert before.difference() == before.described_difference() == ""
    CHANGES[name](model)
    assert before.difference() == before.described_difference() == NAMES[name]
    assert before.has_new_parts() == name.startswith(("another", "wider"))


def test_what_does_not_change_the_training():
    model = network()
    model[0].weight.data[0, 0] = math.nan
    before = ModelBefore(run_of(model), values=True)
    model.eval()
    model.note = "of the user"
    model[1].note = "of the user"
    model[0].weight.data.copy_(model[0].weight.data.clone())
    model[0].weight.grad = torch.ones(16, 7)
    assert before.difference() == ""
    before.restore_modes()
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("layout", ["in place", "in other memory", "of another shape"])
def test_the_model_keeps_its_values_when_the_session_writes_its_own(layout):
    model = network()
    session_memory = model[0].weight
    before = ModelBefore(run_of(model), values=True)
    changed = {
        "in place": lambda: session_memory.data.fill_(7.0),
        "in other memory": lambda: setattr(session_memory, "data", torch.full((16, 7), 7.0)),
        "of another shape": lambda: setattr(session_memory, "data", torch.full((20, 9), 7.0)),
    }
    changed[layout]()
    shape = model[0].weight.shape

    def close() -> None:
        with torch.no_grad():
            session_memory.copy_(torch.ones(16, 7))
            model[3].weight.fill_(1.0)

    kept = model[3].weight.detach().clone()
    before.close(close)
    assert model[0].weight.shape == shape
    assert torch.equal(model[0].weight, torch.full(shape, 7.0))
    assert torch.equal(model[3].weight, kept)


def test_bits_are_compared():
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert same_bits(torch.zeros(3, 2).t(), torch.zeros(2, 3))
    assert same_bits(torch.empty(0), torch.empty(0))
