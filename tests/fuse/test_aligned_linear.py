"""Linear layers whose widths are no multiples of 8: the wider layer computes the same, and only large ones are changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fuse.rewritten import Of, Rewritten, assert_same_step


def wider(inputs: int, outputs: int) -> str:
    return f"linear ({inputs} inputs, {outputs} outputs)"


@pytest.mark.parametrize("aot", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_widths_of_inputs_and_outputs(bias: bool, aot: bool) -> None:
    for inputs, outputs in (65, 72), (72, 65), (67, 71):
        model = Of(lambda m, x: torch.tanh(m.a(x).softmax(-1)), a=nn.Linear(inputs, outputs, bias=bias))
        assert_same_step(model, torch.randn(2, 3, inputs), [wider(72, 72)], aot=aot)


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU(), nn.Sigmoid()])
def test_an_activation_behind_the_layer(activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(129, 130), activation, nn.Linear(130, 64), nn.LayerNorm(64))
    name = type(activation).__name__.lower()
    assert_same_step(model, torch.randn(5, 129), [f"{wider(136, 136)} + {name}", wider(136, 64)], aot=True)


def test_a_mixer_over_tokens() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + m.b(F.gelu(m.a(m.norm(x).transpose(1, 2)))).transpose(1, 2)

    model = Of(forward, norm=nn.LayerNorm(16), a=nn.Linear(68, 256), b=nn.Linear(256, 68))
    assert_same_step(model, torch.randn(2, 68, 16), [f"{wider(72, 256)} + gelu", wider(256, 72)], aot=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.a(x),
        lambda m, x: m.a(x).flatten(0, 1)[1:],
        lambda m, x: torch.relu(m.a(x).view(-1)),
        lambda m, x: m.a(x).as_strided((3,), (1,)),
    ],
)
def test_what_depends_on_strides_or_leaves_the_graph_is_left_alone(function: Any) -> None:
    x = torch.randn(2, 3, 72)
    assert_same_step(Of(function, a=nn.Linear(72, 72)), x, [])
    model = Of(lambda m, x: function(m, x[..., :71]), a=nn.Linear(71, 71))
    assert_same_step(model, x, [], aot=True)


def test_aligned_and_narrow_layers_are_left_alone() -> None:
    for inputs, outputs in (64, 128), (63, 200), (200, 7), (7, 200):
        model = nn.Sequential(nn.Linear(inputs, outputs), nn.Softmax(-1))
        assert_same_step(model, torch.randn(5, inputs), [])


def pays_at(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> bool:
    """Whether the layer would be replaced on a CUDA device."""
    model = nn.Sequential(nn.Linear(inputs, outputs), nn.Softmax(-1)).to("meta", dtype)
    rewritten = Rewritten(model)
    rewritten(torch.randn(rows, inputs, device="meta", dtype=dtype))
    (match,) = rewritten.matches
    return match.pattern.name == "aligned_linear" and match.pattern.pays(match)


def test_only_large_products_of_16_bits_pay() -> None:
    assert pays_at(24576, 196, 384, torch.bfloat16)
    assert pays_at(24576, 384, 196, torch.float16)
    assert not pays_at(24576, 196, 384, torch.float32)
    assert not pays_at(256, 196, 384, torch.bfloat16)  # few rows
    assert not pays_at(4096, 768, 30522, torch.bfloat16)  # the copy of the weight is larger than the input


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = m.a(x)
    y.mul_(m.a.bias)
    return (x.sum() + y).sin()


def changed(change: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        change(y)
        return y.sin()

    return forward


@pytest.mark.parametrize(
    "function",
    [
        changed(lambda y: y.reshape(-1).mul_(2)),
        changed(lambda y: y.flatten(1)[:, :5].zero_()),
        changed(lambda y: y.contiguous().ravel()[::7].fill_(0)),
        changed(lambda y: F.dropout(y, 0.5, False).reshape(-1).mul_(2)),
        without_gradients,
    ],
)
def test_results_that_are_changed_in_place_are_left_alone(function: Any) -> None:
    assert_same_step(Of(function, a=nn.Linear(65, 71)), torch.randn(4, 65), [])


@pytest.mark.parametrize("dropout", [nn.Dropout(0.0), nn.Dropout(0.5).eval()])
def test_a_dropout_that_drops_nothing_behind_the_layer(dropout: nn.Module) -> None:
    model = Of(lambda m, x: F.layer_norm(m.d(m.a(x)) + x, (68,)), a=nn.Linear(68, 68), d=dropout)
    assert_same_step(model, torch.randn(4, 68), [wider(72, 72)], aot=True)
