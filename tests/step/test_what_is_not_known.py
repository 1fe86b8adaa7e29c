"""What a recording depends on and nobody can know, as docs/fusing.md lists it: each stays as it was when it was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.step.loops import batches
from tests.step.tape import taped_step

pytestmark = pytest.mark.usefixtures("no_code", "tapes")


class Base:
    factor = 1.0


class Derived(Base):
    pass


derived = Derived()


class Scale(nn.Module):
    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = len(x)  # set, and never read
        return self.scaled(x) * derived.factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * 1.0


class Decays(torch.optim.SGD):
    """It reads a number of its own."""

    decay = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(self.decay)


def of_an_optimizer(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    optimizer.decay = 0.5


def read_by_a_hook_of_a_tensor(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    state["factor"] = 0.0


def a_hook_of_nodes(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    weight = model[0].weight
    ((node, _),) = weight.expand_as(weight).grad_fn.next_functions
    state["node"] = node  # it lives as long as somebody has it
    node.register_hook(lambda *gradients: state.update(called=1.0))


def a_method_of_a_class(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    state["method"] = 1.0
    Scale.scaled = lambda self, x: x * 0.5  # type: ignore[method-assign]


def an_attribute_that_the_base_class_had(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    Derived.factor = 0.5


def what_forward_only_sets(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    model[1].seen = -1


CHANGES = [
    of_an_optimizer, read_by_a_hook_of_a_tensor, a_hook_of_nodes, a_method_of_a_class, an_attribute_that_the_base_class_had,
    what_forward_only_sets,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_it_stays_as_it_was_recorded(change: Callable[[Any, Any, dict[str, Any]], None]) -> None:
    method = Scale.scaled
    model, (data, *_) = nn.Sequential(nn.Linear(8, 4), Scale()), batches(1)
    state: dict[str, Any] = {"factor": 1.0, "called": 0.0}
    model[0].weight.register_hook(lambda gradient: gradient * state["factor"])
    optimizer = Decays(model.parameters(), lr=0.1)
    step, recordings = taped_step(model, optimizer)
    try:
        for _ in range(4):
            step(*data)
        before = model[0].weight.detach().clone()
        change(model, optimizer, state)
        loss = F.cross_entropy(model[0](data[0]), data[1]).item()
        assert float(step(*data)) == pytest.approx(loss)
        assert not torch.equal(model[0].weight, before)
        (recorded,) = recordings.all()
        assert recorded.replays == 3
        assert state["called"] == 0.0
        assert change is not what_forward_only_sets or model[1].seen == -1
    finally:
        Scale.scaled = method  # type: ignore[method-assign]
        if "factor" in vars(Derived):
            del Derived.factor
