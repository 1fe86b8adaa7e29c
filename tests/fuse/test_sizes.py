"""Sizes that differ from call to call, that only the run knows, and weights of classes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.fuse import patterns
from onelaunch.fuse.patterns import BY_NAME, rewrite
from tests.fuse.rewritten import Rewritten


def compiled_times(function: Any, in_graph: bool, **options: Any) -> tuple[Any, list[int]]:
    """The function as compiled for CUDA, and a list that grows with each graph."""
    graphs: list[int] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(len(rewrite(gm, tuple(BY_NAME), in_graph=in_graph)))
        return gm.forward

    return torch.compile(function, backend=backend, **options), graphs


@pytest.mark.parametrize("in_graph", [True, False])
def test_conditions_do_not_tie_a_graph_to_its_number_of_rows(in_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "is_on_cuda", lambda match: True)
    layer, one, two = (nn.Linear(68, 68).bfloat16() for _ in range(3))

    def function(x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(F.gelu(layer(x)), 0.1)
        return (torch.relu(one(h)) * torch.tanh(two(h))).sum()

    call, graphs = compiled_times(function, in_graph)
    for rows in range(5, 10):
        x = torch.randn(rows, 68, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        call(x)
    assert len(graphs) == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_only_the_run_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "is_on_cuda", lambda match: True)
    a, b = nn.Linear(65, 71), nn.Linear(71, 65)
    functions = (
        lambda x: a(x)[x[:, 0] > 0].sin().sum(),
        lambda x: torch.tanh(a(x[x[:, 0] > 0])).sum(),
        lambda x: F.gelu(a(x)).nonzero().sum() + torch.masked_select(b(a(x)), x > 0).sum(),
    )
    x = torch.randn(40, 65)
    for function in functions:
        for aot in (True, False):
            torch.testing.assert_close(Rewritten(function, aot=aot)(x), function(x))
        for in_graph in (True, False):
            torch.testing.assert_close(compiled_times(function, in_graph)[0](x), function(x))


class Doubled(torch.Tensor):
    """A tensor that is stored as its half, and knows `F.linear` and nothing else."""

    half: torch.Tensor

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Doubled:
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, half: torch.Tensor) -> None:
        self.half = half

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["half"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *others: Any) -> Doubled:
        return Doubled(inner["half"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear:
            return F.linear(*(2 * one.half if isinstance(one, Doubled) else one for one in args))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return Doubled(args[0].half.detach())
        raise NotImplementedError(f"Doubled does not implement {function}")


@pytest.mark.parametrize("width", [16, 65])
def test_tensors_of_a_class_of_its_own_are_left_alone(width: int) -> None:
    x, *weights = (torch.randn(width, width) for _ in range(3))
    for given in ((x, *map(Doubled, weights)), (Doubled(x), *weights)):

        def function(x: torch.Tensor, weights: tuple[torch.Tensor, ...] = given[1:]) -> torch.Tensor:
            return F.gelu(F.linear(x, weights[0])) + F.linear(x, weights[1]).sin()

        rewritten = Rewritten(function)
        torch.testing.assert_close(rewritten(given[0]), function(given[0]))
        assert rewritten.titles == []
