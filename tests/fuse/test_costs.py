"""What operations cost: views nothing, products by their sizes, fused kernels only what enters and leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from onelaunch.fuse.costs import flops_of, fused_cost, is_counter, is_library_call, is_view, unfused_cost
from onelaunch.roofline import Cost
from tests.fuse import rewritten


def nodes_of(function: Any, *args: Any) -> dict[str, fx.Node]:
    return {node.name: node for node in rewritten.nodes_of(function, *args)}


def test_views_cost_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        a, b = x.t().reshape(-1).chunk(2)
        return torch.max(x, 1).values.sum() + a.sum() + b.add_(1).sum()

    nodes = nodes_of(function, torch.randn(4, 4))
    views = {name for name, node in nodes.items() if is_view(node)}
    assert {"t", "chunk"} <= views
    assert not views & {"max_1", "sum_1", "add_", "reshape"}
    assert unfused_cost(nodes["t"]) == Cost()


def test_dropout_in_evaluation_costs_nothing() -> None:
    (evaluated,) = nodes_of(lambda x: F.dropout(x, 0.5, training=False), torch.randn(4)).values()
    (trained,) = nodes_of(lambda x: F.dropout(x, 0.5), torch.randn(4)).values()
    assert unfused_cost(evaluated) == Cost()
    assert unfused_cost(trained).launches == 1


def test_dropout_of_nothing_and_empty_values_cost_nothing() -> None:
    nodes = nodes_of(lambda x: F.dropout(x, 0.0).exp() + torch.tensor([]).sum(), torch.randn(4))
    assert [unfused_cost(node).launches for node in nodes.values()] == [0, 1, 0, 1, 1]


def test_a_recurrent_cell_is_products_with_its_matrices() -> None:
    cell = nn.GRUCell(6, 8)
    (node,) = nodes_of(lambda x, h: cell(x, h), torch.randn(5, 6), torch.randn(5, 8)).values()
    assert is_library_call(node)
    assert flops_of(node) == 2 * 5 * 24 * (6 + 8)


def test_counters_are_no_operation() -> None:
    count = torch.tensor(0)
    nodes = nodes_of(lambda x: (count.add_(1), x + 1)[1], torch.randn(3))
    assert [is_counter(node) for node in nodes.values()] == [True, False]


def test_products_and_convolutions() -> None:
    weight, kernel = torch.randn(5, 6), torch.randn(4, 3, 3, 3)
    nodes = nodes_of(
        lambda x, y: (F.linear(x, weight), F.conv2d(y, kernel)), torch.randn(7, 6), torch.randn(2, 3, 8, 8)
    )
    linear, conv = nodes.values()
    assert is_library_call(linear)
    assert is_library_call(conv)
    assert flops_of(linear) == 2 * 7 * 5 * 6
    assert flops_of(conv) == 2 * (2 * 4 * 6 * 6) * 27
    assert unfused_cost(linear) == Cost(4 * (7 * 6 + 5 * 6 + 7 * 5), 2 * 7 * 5 * 6, 1)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.addmm, [(9,), (4, 6), (6, 9)]), (torch.Tensor.addmm, [(9,), (4, 6), (6, 9)]),
        (torch.baddbmm, [(2, 4, 9), (2, 4, 6), (2, 6, 9)]), (torch.matmul, [(2, 4, 6), (6, 9)]),
        (F.conv_transpose2d, [(2, 4, 8, 8), (4, 5, 3, 3)]), (F.conv_transpose1d, [(2, 4, 8), (4, 5, 3)]),
        (F.conv3d, [(2, 4, 8, 8, 8), (5, 4, 3, 3, 3)]),
    ],
)  # fmt: skip
def test_flops_are_those_that_pytorch_counts(function: Callable[..., torch.Tensor], shapes: list[Any]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    (node,) = nodes_of(lambda *tensors: function(*tensors), *tensors).values()
    with FlopCounterMode(display=False) as counter:
        function(*tensors)
    assert is_library_call(node)
    assert flops_of(node) == counter.get_total_flops()


def test_attention_is_differentiated_too() -> None:
    q = torch.randn(2, 4, 8, requires_grad=True)
    (node,) = nodes_of(lambda q: F.scaled_dot_product_attention(q, q, q), q).values()
    assert unfused_cost(node).launches == 3


def test_a_layer_of_attention_has_four_projections_and_two_products_per_head() -> None:
    layer, x, y = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8), torch.randn(3, 7, 8)
    nodes = nodes_of(lambda x, y: layer(x, y, y, need_weights=False)[0], x, y)
    (flops,) = (flops_of(node) for node in nodes.values() if is_library_call(node))
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        layer(x, y, y, need_weights=False)
    assert flops == counter.get_total_flops() == 2 * 3 * 8 * (2 * 5 * 8 + 2 * 7 * 8 + 2 * 5 * 7)


def test_a_fused_kernel_moves_what_enters_and_leaves() -> None:
    nodes = list(nodes_of(lambda x: torch.tanh(torch.sin(x) + 1), torch.randn(10)).values())
    assert fused_cost(nodes) == Cost(80, 30, 1)
    assert sum((unfused_cost(node) for node in nodes), Cost()) == Cost(240, 30, 3)
    nodes = list(nodes_of(lambda x: torch.sin(x) + 1, torch.randn(10, requires_grad=True)).values())
    assert fused_cost(nodes).launches == 2
