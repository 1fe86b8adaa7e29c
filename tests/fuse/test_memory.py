"""Which memory the operations of a captured graph change in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from onelaunch.fuse.backend import changes_inputs
from onelaunch.fuse.captured import capture_graphs
from onelaunch.fuse.memory import storages_of, written_by
from tests.fuse.rewritten import Rewritten, nodes_of, view_and_add


def test_memory_of_views_and_of_what_is_written() -> None:
    double, view, relu, _, add = nodes_of(view_and_add, torch.randn(2, 3))
    assert storages_of(double) == storages_of(view) != storages_of(relu)
    assert written_by(add) == [relu]
    assert written_by(relu) == []


def test_written_by_operators_and_inplace_arguments() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        x += 1
        F.relu(x, True)
        x[0] = 2
        return x

    made, *rest = nodes_of(function, torch.randn(3))
    assert all(written_by(node) for node in rest)
    assert written_by(made) == []


@pytest.mark.parametrize(
    "module", [nn.ReLU6(True), nn.Hardtanh(inplace=True), nn.CELU(inplace=True), nn.Hardsigmoid(True), nn.RReLU(inplace=True),
               nn.Threshold(0, 1, True), nn.Dropout2d(inplace=True), nn.Mish(True)],
)  # fmt: skip
def test_written_by_modules_that_work_in_place(module: nn.Module) -> None:
    made, node = nodes_of(lambda x: module(x * 1), torch.randn(2, 3, 2, 2))
    assert written_by(node) == [made]
    module.inplace = False  # type: ignore[assignment]
    assert written_by(nodes_of(lambda x: module(x * 1), torch.randn(2, 3, 2, 2))[1]) == []


def test_written_by_arguments_with_names() -> None:
    made, node = nodes_of(lambda x: F.relu6(inplace=True, input=x * 1), torch.randn(3))
    assert written_by(node) == [made]


@torch.library.custom_op("onelaunch_tests::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


@torch.compiler.allow_in_graph
def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


WRITERS: dict[str, Any] = {
    "list": lambda x: torch._foreach_mul_([x], 2.0),
    "overload": lambda x: torch.ops.aten.mul_.Tensor(x, 2.0),
    "packet": lambda x: torch.ops.aten.mul_(x, 2.0),
    "operator": lambda x: x.__iadd__(2.0),
    "norm": lambda x: F.batch_norm(torch.ones(2, 4), x[0], x[1], training=True),
    "other norm": lambda x: F.instance_norm(torch.ones(2, 4, 3), x[0], x[1]),
    "embedding": lambda x: F.embedding(torch.tensor([0]), x, max_norm=0.5),
    "bag": lambda x: F.embedding_bag(torch.tensor([[0]]), x, None, 0.5),
    "custom": lambda x: torch.ops.onelaunch_tests.double(x),
    "unknown": unknown,
    "checkpoint": lambda x: checkpoint(lambda y: y.mul_(2).tanh(), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", WRITERS)
def test_writers_of_every_kind_are_seen(name: str) -> None:
    """By the list of arguments that are changed, by layers with one input, and before a CUDA graph is recorded."""
    q, k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(q(x))
        WRITERS[name](x)
        return first + torch.tanh(k(x))

    x = torch.rand(3, 4) + 1
    rewritten = Rewritten(forward)
    with torch.no_grad():
        torch.testing.assert_close(rewritten(x.clone()), forward(x.clone()))
    assert not any("as one" in title for title in rewritten.titles)
    graph = capture_graphs(forward, (x.clone(),), {})[0].graph
    given = [x if "x" in node.name else q.weight for node in graph.nodes if node.op == "placeholder"]
    assert changes_inputs(graph, given)
    assert not changes_inputs(graph, [q.weight] * len(given))


def test_reading_is_not_writing() -> None:
    def function(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        x = F.batch_norm(x, norm[0], norm[1]) + F.embedding(torch.tensor([0]), x)
        return torch.ops.aten.add(torch.ops.aten.mul.Tensor(x, 2.0), x)

    assert not any(map(written_by, nodes_of(function, torch.randn(3, 4), torch.ones(2, 4))))
