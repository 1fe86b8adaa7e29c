"""What a model is held by, or holds, beside its registered modules: containers, helpers, closures, hooks, other people's
tables. Fusing leaves what is others' alone, and what is the model's follows the fused model."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import onelaunch as ol
from onelaunch.fuse.backend import onelaunch as backend
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

    model = make()
    compiled = torch.compile(model, backend=spy, dynamic=dynamic, fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for count in (16, 15, 7, 33):
            x = torch.randn(count, WIDE, dtype=torch.float64)
            torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-12)
    assert len(captured) == graphs
    assert all("onelaunch_fuse_calls" in graph.code for graph in captured)
