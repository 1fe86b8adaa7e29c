"""Reading a captured graph: operations with their arguments, users, tensors, and modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.fuse.graph import is_layer, module_of, next_operation, operation_of, sole_user, tensor_of
from tests.fuse.rewritten import nodes_of, view_and_add


@pytest.mark.parametrize(
    ("function", "name", "p"),
    [
        (lambda x: F.dropout(x, 0.3), "dropout", 0.3),
        (lambda x: F.dropout(x, training=False), "dropout", 0.0),
        (lambda x: torch.dropout(x, 0.25, train=True), "dropout", 0.25),
        (lambda x: F.relu(x), "relu", None),
        (lambda x: x.sigmoid_(), "sigmoid", None),
        (lambda x: x + 1, "add", None),
    ],
)
def test_operations(function: Any, name: str, p: float | None) -> None:
    operation = operation_of(nodes_of(function, torch.randn(3))[-1])
    assert operation is not None
    assert (operation.name, operation.dropout) == (name, p)


def test_unknown_operations_and_arguments() -> None:
    assert operation_of(nodes_of(lambda x: x.cos(), torch.randn(3))[0]) is None
    assert operation_of(nodes_of(lambda x: torch.sigmoid(x, out=torch.empty(3)), torch.randn(3))[-1]) is None


def test_activation_needs_its_settings() -> None:
    def activation(function: Any) -> str | None:
        operation = operation_of(nodes_of(function, torch.randn(3))[0])
        assert operation is not None
        return operation.activation

    assert activation(F.gelu) == "gelu"
    assert activation(lambda x: F.gelu(x, approximate="tanh")) == "gelu_tanh"
    assert activation(lambda x: F.leaky_relu(x, 0.1)) is None
    assert activation(lambda x: F.dropout(x, 0.5)) is None


def test_users_and_tensors() -> None:
    double, view, relu, *_ = nodes_of(view_and_add, torch.randn(2, 3))
    assert sole_user(double) is None
    assert sole_user(view) is not None
    assert next_operation(relu) is not None
    tensor = tensor_of(view)
    assert tensor is not None
    assert tensor.shape == (6,)
    assert tensor_of(3) is None


def test_modules_by_their_path() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
            self.named = nn.ModuleDict({"a": nn.Sequential(nn.Linear(3, 3))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.named["a"](self.blocks[1](self.blocks[0](x))).relu()

    model = Model()
    nodes = nodes_of(lambda x: model(x), torch.randn(2, 3))
    assert [module_of(node) for node in nodes] == ["blocks.0", "blocks.1", "named.a.0", ""]
    operation = operation_of(nodes[0])
    assert operation is not None
    assert is_layer(operation)
