"""Forwards that keep state, read what moves, or ask what a proxy answers wrongly: refused, and nothing of a trace stays."""

from __future__ import annotations

import itertools
import random
import types
from collections import UserDict, deque
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse.placing import regions
from tests.fuse.compare import assert_same, planned
from tests.fuse.test_guards import WIDE, Base, layer, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


class Stateful(Base):
    """Keeps something one level down, where a comparison of attributes does not see it."""

    counted: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        super().__init__()
        self.nested: dict[str, list[torch.Tensor]] = {"seen": []}
        self.space = types.SimpleNamespace(calls=0)
        self.queue: deque[torch.Tensor] = deque(maxlen=3)
        self.cycle = itertools.cycle([1.0, 2.0])
        self.generator = random.Random(3)

    def state(self) -> tuple[object, ...]:
        return (self.nested["seen"], self.space.calls, list(self.queue), GLOBAL, self.counted)


class Nested(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(x))
        self.nested["seen"].append(h)
        return h * len(self.nested["seen"])


class Spaced(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.space.calls += 1
        return F.relu(self.fc(x)) / self.space.calls


class Queued(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(x))
        self.queue.append(h)
        return h * len(self.queue)


class OfModule(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(x))
        GLOBAL.append(h)
        return h * len(GLOBAL)


class OfClass(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(x))
        self.counted.append(h)
        return h * len(self.counted)


class Cycled(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x)) * next(self.cycle)


class Drawn(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x)) * self.generator.random()


GLOBAL: list[torch.Tensor] = []


@pytest.mark.parametrize("kind", [Nested, Spaced, Queued, OfModule, OfClass, Cycled, Drawn])
def test_state_that_a_forward_keeps_anywhere(kind: type[Stateful]) -> None:
    GLOBAL.clear()
    Stateful.counted.clear()
    x, model, alone = rows(), kind(), kind()
    alone.load_state_dict(model.state_dict())
    expected = [alone(x) for _ in range(3)]
    GLOBAL.clear()
    Stateful.counted.clear()
    fused = ol.fuse(model)
    assert model.state() == ([], 0, [], [], [])
    for value in expected:
        assert torch.equal(fused(x), value)


def test_a_child_with_state_stays_one_call_and_its_parent_fuses() -> None:
    model = nn.Sequential(Spaced(), layer(), nn.Tanh())
    fused = ol.fuse(model)
    assert planned(fused, rows()) == ["linear + tanh"]


def test_a_seed_set_in_a_forward() -> None:
    class Seeded(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seed()
            return F.dropout(F.relu(self.fc(x)), 0.5)

    def seed() -> None:
        torch.manual_seed(0)

    model, x = Seeded(), rows()
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(1000, ())) + 1)
        before = torch.get_rng_state()
        fused = ol.fuse(model)
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(fused(x), fused(x))
        assert torch.equal(fused(x), model(x))


def test_numbers_of_numpy() -> None:
    class Divided(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scale = np.sqrt(WIDE)

        def forward(self, x: torch.Tensor, factor: float | None = None) -> torch.Tensor:
            return F.relu(self.fc(x)) / (self.scale if factor is None else factor)

    model = Divided()
    fused = ol.fuse(model)
    assert planned(fused, rows()) == ["linear + relu"]
    for factor in (None, np.float64(3), np.float32(3), np.int64(3)):
        assert_same(model, fused, rows(), factor)


class Optional(Base):
    def forward(self, batch: Any, key: Any = None) -> torch.Tensor:
        x, mask = (batch["x"], batch["mask"]) if key is None else (batch[0], batch[1])
        h = F.relu(self.fc(x))
        return h if mask is None else h + mask


class Same(Base):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(query))
        return h * 2 if query is key else h + key


def test_containers_and_tensors_passed_twice_are_part_of_the_kind_of_a_call() -> None:
    model, same, x = Optional(), Same(), rows()
    fused, fused_same = ol.fuse(model), ol.fuse(same)
    for mask in (None, rows(), None):
        assert torch.equal(fused({"x": x, "mask": mask}), model({"x": x, "mask": mask}))
        assert torch.equal(fused((x, mask), 1), model((x, mask), 1))
    batch = UserDict(x=x, mask=None)
    assert torch.equal(fused(batch), model(batch))
    for key in (x, rows(), x):
        assert torch.equal(fused_same(x, key), same(x, key))
    plan = regions(fused_same)[0].plan((x, x), {})
    assert plan is not None
    assert [chain.name for chain in plan.fused] == ["linear + relu"]


class Fills(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Appends()

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        return F.relu(self.fc(self.norm(x, found)))


class Appends(Base):
    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            found.append(x)
        return x


def test_a_list_that_is_given_and_filled() -> None:
    found: list[torch.Tensor] = []
    fused, x = ol.fuse(Fills()), rows()
    fused(x, found)
    assert found == [x]


def doubled(x: Any) -> Any:
    return x * 2 if isinstance(x, torch.Tensor) else x


class OfDtype(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.dtype
        return F.relu(self.fc(x)) * (2 if kind is torch.float64 else 1)


class OfGraph(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x)) * (2 if x.grad_fn is None else 1)


class Helped(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(F.relu(self.fc(x)))


class Matched(Base):
    def forward(self, x: Any) -> torch.Tensor:
        match x:
            case torch.Tensor():
                return F.relu(self.fc(x)) * 2
        return F.relu(self.fc(x))


class Attending(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDE, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, weights = self.attention(x, x, x, need_weights=False)
        return F.relu(self.fc(h)) * (2 if weights is None else 1)


class Contiguous(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = x.contiguous()
        return F.relu(self.fc(x)) * (2 if packed is x else 1)


class Trying(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.fc(x))
        try:
            return h.reshape(7, -1)
        except RuntimeError:
            return h


class Asking(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x)) * getattr(x, "importance", 1.0)


class Pair(list[torch.Tensor]):
    pass


class Listed(Base):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair([F.relu(self.fc(x)), x])


@pytest.mark.parametrize("kind", [OfDtype, OfGraph, Helped, Matched, Attending, Contiguous, Trying, Asking, Listed])
def test_questions_that_only_a_tensor_answers(kind: type[Base]) -> None:
    model = kind()
    fused, x = ol.fuse(model), rows()
    assert_same(model, fused, x)
    assert type(fused(x)) is type(model(x))


@pytest.mark.parametrize("name", ["a\\nb", 'c"d', "e\nf"])
def test_a_name_that_code_cannot_have(name: str) -> None:
    model = nn.Sequential()
    model.add_module(name, layer())
    model.add_module("relu", nn.ReLU())
    assert_same(model, ol.fuse(model), rows())


class Closed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = lambda h: F.dropout(h, 0.5, training=self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(F.relu(self.fc(x)))


def test_a_closure_over_the_model_is_one_over_the_fused_model() -> None:
    model, x = Closed(), rows()
    fused = ol.fuse(model).eval()
    assert model.training
    assert torch.equal(fused(x), F.relu(model.fc(x)))
    assert planned(fused, x)


class Feature(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(layer(), nn.ReLU())
        self.fc.register_forward_hook(self.keep)

    def keep(self, module: nn.Module, given: Any, result: torch.Tensor) -> None:
        self.kept = result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(x)) + self.kept


def test_a_hook_that_is_a_method_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Feature(), rows()
    expected = model(x)
    assert ol.fuse(model) is model
    assert "held by a hook of its own" in caplog.text
    model(rows())
    outer = nn.Sequential(model, layer(), nn.Tanh())
    fused = ol.fuse(outer)
    assert planned(fused, x) == ["linear + tanh"]
    assert torch.equal(fused[0](x), expected)
    assert_same(outer, fused, x)
