"""Activations written out in elementary operations: found by their values, and near misses are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.fuse.rewritten import Rewritten

Function = Callable[[torch.Tensor], torch.Tensor]


def gpt2(z: torch.Tensor) -> torch.Tensor:
    return 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))


def titles(function: Function) -> list[str]:
    torch.manual_seed(0)
    layer, x = nn.Linear(6, 6).double(), torch.randn(5, 6, dtype=torch.float64)
    rewritten = Rewritten(lambda x: function(layer(x)))
    torch.testing.assert_close(rewritten(x), function(layer(x)))
    return rewritten.titles


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (gpt2, "gelu_tanh"),
        (lambda z: z * torch.sigmoid(z), "silu"),
        (lambda z: z.sigmoid().mul(z), "silu"),
        (lambda z: z / (1 + torch.exp(-z)), "silu"),
        (lambda z: z * 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0))), "gelu"),
        (lambda z: 1 / (1 + torch.exp(-z)), "sigmoid"),
        (lambda z: z * torch.tanh(torch.nn.functional.softplus(z)), None),  # softplus is no elementary operation
    ],
)
def test_formulas(function: Function, name: str | None) -> None:
    assert titles(function) == ([] if name is None else [f"linear + {name}"])


@pytest.mark.parametrize(
    "function",
    [
        lambda z: 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.0447 * z**3))),
        lambda z: z * torch.sigmoid(1.702 * z),
        lambda z: 0.5 * z * (1 + torch.erf(z / 1.4)),
        lambda z: 0.5 * z * (1 + torch.tanh(0.8 * (z + 0.044715 * z**3))),
    ],
)
def test_near_misses_are_not_taken(function: Function) -> None:
    assert titles(function) == []


def test_values_used_elsewhere_are_not_taken() -> None:
    assert titles(lambda z: (s := torch.sigmoid(z)) * z + s) == []
    assert titles(lambda z: z * torch.sigmoid(z) + z) == []
    assert titles(lambda z: torch.cat([z * torch.sigmoid(z), z.cos()])) == []


def test_what_follows_stays() -> None:
    assert titles(lambda z: 2 * (z * torch.sigmoid(z)) + 1) == ["linear + silu"]


def test_a_tensor_in_the_formula_is_no_constant() -> None:
    scale = torch.ones(6, dtype=torch.float64)
    assert titles(lambda z: z * torch.sigmoid(z * scale)) == []
