"""Attention with a mask that is always the same: which masks count as such, and what is computed then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from onelaunch.fuse.graph import value_of
from tests.fuse.rewritten import Of, Rewritten, assert_same_step, titles_of


def causal_by_arange(x: torch.Tensor) -> torch.Tensor:
    """As `transformers` does it, for every row of the batch."""
    position = torch.arange(x.shape[1], device=x.device)
    mask = position[None, None, None, :] <= position[None, None, :, None]
    return (mask & position.new_ones((), dtype=torch.bool)).expand(len(x), -1, -1, -1)


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask.logical_or_(x[0, 0, 0] > 100)
    return mask


def changed_through_a_view(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 3:].fill_(False)
    return mask


def not_causal_after_all(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask.diagonal(-1).zero_()
    return mask


MASKS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "arange": (causal_by_arange, ["attention (causal mask)"]),
    "tril": (lambda x: torch.ones(4, 4, dtype=torch.bool).tril(), ["attention (causal mask)"]),
    "full": (lambda x: torch.ones(4, 4, dtype=torch.bool), ["attention (full mask)"]),
    "banded": (lambda x: torch.ones(4, 4, dtype=torch.bool).tril().triu(-1), []),
    "of the input": (lambda x: causal_by_arange(x) & (x[:, None, :, :1] < 100), []),
    "in place": (changed_in_place, []),
    "through a view": (changed_through_a_view, []),
    "through a diagonal": (not_causal_after_all, []),
    "additive": (lambda x: torch.zeros(4, 4, dtype=x.dtype), ["attention (full mask)"]),
    "infinite": (
        lambda x: nn.Transformer.generate_square_subsequent_mask(4, dtype=x.dtype),
        ["attention (causal mask)"],
    ),
    "largest": (
        lambda x: torch.full((4, 4), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1),
        ["attention (causal mask)"],
    ),
    "weights": (lambda x: torch.full((4, 4), -8.0, dtype=x.dtype).triu(1), []),
}


@pytest.mark.parametrize("name", MASKS)
def test_attention_with_a_mask_that_never_changes(name: str) -> None:
    make, titles = MASKS[name]

    def forward(model: Of, x: torch.Tensor) -> torch.Tensor:
        heads = model.a(x)[:, None]
        return F.scaled_dot_product_attention(heads, x[:, None], heads * 2, attn_mask=make(x))[:, 0]

    assert_same_step(Of(forward, a=nn.Linear(6, 6)), torch.randn(3, 4, 6), titles, aot=name == "arange")


def test_a_mask_that_autocast_rounds_is_not_causal() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):  # beyond 256 it holds every second integer only
            position = F.linear(torch.arange(300.0)[:, None], torch.ones(1, 1))[:, 0]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=position[:, None] >= position[None])

    x = torch.randn(1, 300, 4, dtype=torch.float64)
    rewritten = Rewritten(forward)
    torch.testing.assert_close(rewritten(x), forward(x))
    assert rewritten.titles == []


def causal(x: torch.Tensor) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)


LAYERS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], dict[str, Any]], int]] = {
    "causal": ({}, lambda x: {"attn_mask": causal(x)}, 1),
    "what is after": ({}, lambda x: {"attn_mask": causal(x).t().contiguous()}, 0),
    "true where hidden": ({}, lambda x: {"attn_mask": torch.ones(len(x), len(x), dtype=torch.bool).triu(1)}, 1),
    "for each head": ({}, lambda x: {"attn_mask": causal(x).expand(6, -1, -1)}, 0),
    "of the input": ({}, lambda x: {"attn_mask": causal(x) + x[0, 0, 0]}, 0),
    "padding": ({}, lambda x: {"attn_mask": causal(x), "key_padding_mask": torch.zeros(3, len(x), dtype=x.dtype)}, 0),
    "biases": ({"add_bias_kv": True}, lambda x: {"attn_mask": causal(x)}, 0),
    "one more zero": ({"add_zero_attn": True}, lambda x: {"attn_mask": causal(x)}, 0),
    "weights": ({}, lambda x: {"attn_mask": causal(x), "need_weights": True}, 0),
    "hinted": ({}, lambda x: {"attn_mask": causal(x), "is_causal": True}, 0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_a_causal_mask(name: str) -> None:
    options, arguments, matches = LAYERS[name]

    def forward(model: Of, x: torch.Tensor) -> torch.Tensor:
        return model.layer(x, x, x, **{"need_weights": False, **arguments(x)})[0]

    layer = nn.MultiheadAttention(6, 2, **options)
    titles = ["attention (causal mask)"] * matches
    assert_same_step(Of(forward, layer=layer), torch.randn(4, 3, 6), titles, aot=name == "causal")


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rand_like": lambda ones: torch.rand_like(ones) > -1,
    "randn_like": lambda ones: torch.randn_like(ones) > -100,
    "randint_like": lambda ones: torch.randint_like(ones, 2) > -1,
    "normal": lambda ones: torch.normal(ones) > -100,
    "bernoulli": lambda ones: torch.bernoulli(ones).bool(),
    "poisson": lambda ones: torch.poisson(ones) > -1,
    "dropout": lambda ones: F.dropout(ones) > -1,
    "rrelu": lambda ones: F.rrelu(-ones, training=True) > -1,
    "empty_like": lambda ones: (torch.empty_like(ones) > 0) | True,
}


@pytest.mark.parametrize("name", RANDOM)
def test_a_random_mask_is_no_constant_and_takes_no_random_numbers(name: str) -> None:
    """Each is always true, which only the operator's kind tells from one that is not."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=RANDOM[name](torch.ones(4, 4)))

    x = torch.randn(2, 4, 6)
    torch.manual_seed(0)
    expected = forward(x), torch.rand(1)
    torch.manual_seed(0)
    rewritten = Rewritten(forward)
    torch.testing.assert_close((rewritten(x), torch.rand(1)), expected)
    assert rewritten.titles == []


def test_attention_with_a_causal_mask_of_other_keys_keeps_it() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(3, 5, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x[:, :3], x, x, attn_mask=mask)

    assert titles_of(forward, torch.randn(2, 5, 6)) == []


@pytest.mark.parametrize(("query", "mask"), [((2, 5, 6), (1, 1, 5, 5)), ((1, 2, 5, 6), (3, 1, 5, 5))])
@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_that_does_not_fit_is_left(query: tuple[int, ...], mask: tuple[int, ...], causal: bool) -> None:
    """PyTorch raises; without its mask, attention would not."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        full = torch.ones(mask, dtype=torch.bool)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=full.tril() if causal else full)

    rewritten = Rewritten(forward)
    with contextlib.suppress(RuntimeError):
        rewritten(torch.randn(query))
    assert rewritten.titles == []


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_a_mask_for_another_device_is_computed_on_the_cpu(device: Any) -> None:
    graph = fx.Graph()
    ones = graph.call_function(torch.ones, (4, 4), {"dtype": torch.bool, "device": device})
    mask = graph.call_method("tril", (graph.call_method("to", (ones, device)),))
    value = value_of(mask, {}, lambda node: True)
    assert value.device.type == "cpu"
    assert torch.equal(value, torch.ones(4, 4, dtype=torch.bool).tril())


def test_a_mask_of_many_operations() -> None:
    graph = fx.Graph()
    mask = graph.call_function(torch.ones, (4, 4))
    for _ in range(1500):
        mask = graph.call_method("mul", (mask, mask))
    assert value_of(mask, {}, lambda node: True).all()
    values: dict[fx.Node, Any] = {}
    with pytest.raises(ValueError, match="mul"):
        value_of(mask, values, lambda node: len(values) < 100)
    assert len(values) == 100
