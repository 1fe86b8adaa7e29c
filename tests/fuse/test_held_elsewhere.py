"""What a model is held by, or holds, beside its registered modules: containers, helpers, closures, hooks, other people's
tables. Fusing leaves what is others' alone, and what is the model's follows the fused model."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import pickle
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import onelaunch as ol
from onelaunch.fuse.backend import onelaunch as backend
from onelaunch.fuse.placing import regions
from onelaunch.fuse.state import unchanged
from onelaunch.fuse.tracing import RefusedError
from tests.fuse.compare import assert_same
from tests.fuse.test_guards import WIDE, Base, layer, rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


class Makes(collections.OrderedDict[str, Any]):
    """A table that gives instances of the classes it holds, as transformers' ACT2FN does."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


TABLE = Makes(relu=nn.ReLU, gelu=nn.GELU)


class FromTable(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return TABLE["relu"](self.fc(x))


def test_a_table_that_makes_what_it_gives_stays_as_it_is() -> None:
    model = FromTable()
    fused = ol.fuse(model)
    assert dict.__repr__(TABLE) == dict.__repr__(Makes(relu=nn.ReLU, gelu=nn.GELU))
    assert_same(model, fused, rows())


def test_containers_with_methods_of_their_own_are_put_back() -> None:
    table, counter = Makes(relu=nn.ReLU, gelu=nn.GELU), collections.Counter(calls=2)

    def change() -> None:
        with unchanged([], {"table": table, "counter": counter}):
            table["tanh"] = nn.Tanh
            table.move_to_end("relu")
            counter["calls"] += 1

    with pytest.raises(RefusedError, match="changes its attribute"):
        change()
    assert list(dict.items(table)) == [("relu", nn.ReLU), ("gelu", nn.GELU)]
    assert list(table) == ["relu", "gelu"]
    assert counter == {"calls": 2}


class Filtered(Base):
    """A number of rows that only a run knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x[x[:, 0] > 0]))


@pytest.mark.parametrize(
    ("make", "dynamic", "graphs"),
    [
        (lambda: nn.Sequential(layer(), nn.ReLU(), nn.BatchNorm1d(WIDE, dtype=torch.float64), nn.GELU()), None, 2),
        (lambda: nn.Sequential(layer(), nn.GELU(), layer()).eval(), True, 1),
        (Filtered, True, 1),
    ],
    ids=["second size", "dynamic", "unknown"],
)
def test_the_backend_takes_sizes_that_are_symbols(
    make: Callable[[], nn.Module], dynamic: bool | None, graphs: int
) -> None:
    import torch._dynamo

    captured: list[fx.GraphModule] = []

    def spy(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        captured.append(gm)
        return backend(gm, inputs)

    torch._dynamo.reset()  # which remembers the sizes that a Sequential of any test had
    model = make()
    compiled = torch.compile(model, backend=spy, dynamic=dynamic, fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for count in (16, 15, 7, 33):
            x = torch.randn(count, WIDE, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    assert len(captured) == graphs
    assert all("onelaunch_fuse_calls" in graph.code for graph in captured)


class Pair(NamedTuple):
    drop: nn.Module
    number: int


class Helper:
    def __init__(self, drop: Any) -> None:
        self.drop, self.itself, self.shared = drop, [self], TABLE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x)


class Slotted:
    __slots__ = ("drop", "unset")

    def __init__(self, drop: Any) -> None:
        self.drop = drop


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


def calls_itself(drop: nn.Module) -> Callable[..., torch.Tensor]:
    parts = [drop]

    def run(x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        return run(x, depth - 1) if depth else parts[0](x)

    return run


# How a model holds its dropout a second time, and how it gets it from there.
HELD: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "OrderedDict": (lambda drop: collections.OrderedDict(drop=drop), lambda held: held["drop"]),
    "defaultdict": (lambda drop: collections.defaultdict(list, drop=drop), lambda held: held["drop"]),
    "dict subclass": (lambda drop: Attributes(drop=drop), lambda held: held.drop),
    "deque": (lambda drop: collections.deque([1, drop], 2), lambda held: held[1]),
    "named tuple": (lambda drop: Pair(drop, 1), lambda held: held.drop),
    "key": (lambda drop: {drop: 1}, lambda held: next(iter(held))),
    "set": (lambda drop: {drop}, lambda held: next(iter(held))),
    "frozenset": (lambda drop: frozenset([drop]), lambda held: next(iter(held))),
    "namespace": (lambda drop: types.SimpleNamespace(drop=drop), lambda held: held.drop),
    "helper": (Helper, lambda held: held.itself[0]),
    "slots": (Slotted, lambda held: held.drop),
    "user dict": (lambda drop: collections.UserDict(drop=drop), lambda held: held["drop"]),
    "method of a helper": (lambda drop: Helper(drop).__call__, lambda held: held),
    "closure": (calls_itself, lambda held: held),
    "default": (lambda drop: lambda x, parts=(drop,): parts[0](x), lambda held: held),
    "partial": (lambda drop: functools.partial(Helper.__call__, Helper(drop)), lambda held: held),
    "weak reference": (weakref.ref, lambda held: held()),
    "weak proxy": (lambda drop: [weakref.proxy(drop)], lambda held: held[0]),
    "lists": (lambda drop: [[{"drop": (drop,)}]], lambda held: held[0][0]["drop"][0]),
}


class Holds(Base):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        hold, self.get = HELD[how]
        self.held = hold(self.drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get(self.held)(F.relu(self.fc(x)))


@pytest.mark.parametrize("how", HELD)
def test_the_mode_reaches_modules_that_are_held_a_second_time(how: str) -> None:
    model, x = Holds(how), rows()
    fused = ol.fuse(model)
    assert fused is not model
    fused.eval()
    assert torch.equal(fused(x), F.relu(model.fc(x)))
    assert model.training
    assert not torch.equal(model(x), model(x))
    fused.train()
    model.eval()
    assert not torch.equal(fused(x), fused(x))
    copied = copy.deepcopy(fused).eval()
    if how not in ("weak reference", "weak proxy", "closure", "default"):  # which a deep copy does not follow either
        assert torch.equal(copied(x), copied(x))


def test_what_leads_to_no_module_stays_shared() -> None:
    model = Holds("helper")
    model.held.counts = [1]
    model.other = Helper(None)
    fused = ol.fuse(model)
    assert fused.held is not model.held
    assert fused.held.itself == [fused.held]
    assert fused.held.counts is model.held.counts
    assert fused.held.shared is TABLE
    assert fused.other is model.other


class Alternates(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.parts = itertools.cycle([self.drop])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(self.parts)(F.relu(self.fc(x)))


class Wraps(Base):
    """A module that is not registered, around one that is."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.wrapper = [nn.Sequential(self.drop)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrapper[0](F.relu(self.fc(x)))


@pytest.mark.parametrize(("kind", "name"), [(Alternates, "a cycle"), (Wraps, "a Sequential")])
def test_modules_held_in_what_cannot_be_copied(kind: type[Base], name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = kind(), rows()
    assert ol.fuse(model) is model
    assert name in caplog.text
    assert ol.fuse(model, x) is model
    assert any(name in note for note in ol.explain(model, x).notes)


class Child(Base):
    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self.owner = [owner]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.fc(x))


def test_a_part_that_knows_the_model_it_is_in_keeps_it() -> None:
    model = nn.Sequential()
    model.append(Child(model))
    assert ol.fuse(model.get_submodule("0")).owner[0] is model  # type: ignore[index]
    fused = ol.fuse(model)
    assert fused.get_submodule("0").owner[0] is fused  # type: ignore[index]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(layer(), nn.ReLU())
        self.large = nn.Linear(WIDE, 10_000, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.part(x)) if (x == x).all() else x


def test_a_copy_of_a_part_does_not_take_the_whole_model_along() -> None:
    model, x = Branches(), rows()
    fused = ol.fuse(model)
    part = fused.part
    assert len(pickle.dumps(part)) < 5_000
    assert torch.equal(copy.deepcopy(part)(x), model.part(x))
    for whole in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert ol.fuse(whole) is whole
        assert_same(model, fused, x)
    outer = nn.Sequential(part, nn.Tanh())
    assert ol.fuse(outer) is not outer  # a part in another model is no fused model


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_part_keeps_what_is_fused_in_it() -> None:
    inner = ol.fuse(nn.Sequential(layer(), nn.ReLU()))
    compiled: Any = torch.compile(inner, backend="eager")
    outer = nn.Sequential(compiled, layer(), nn.Tanh())
    ol.fuse(outer)
    assert regions(inner)
