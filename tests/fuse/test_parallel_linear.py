"""Linear layers with one input: which stay apart because of strides or gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fuse.rewritten import Of, Rewritten, assert_same_step

APART = ("parallel_linear",)


@torch.library.custom_op("onelaunch_tests::flat", mutates_args=())
def flat(x: torch.Tensor) -> torch.Tensor:
    """Takes its input to be contiguous."""
    return x.as_strided((x.numel(),), (1,), x.storage_offset()).clone()


@flat.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel())


def layers() -> dict[str, nn.Module]:
    return {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)}


def windows(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.k(x)
    s = h.stride()
    pairs = h.as_strided((len(x), x.shape[1] - 1, 2, 8), (s[0], s[1], s[1], s[2]))
    return pairs.sum(2) + torch.tanh(m.q(x))[:, 1:]


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "as_strided": windows,
    "flattened view": lambda m, x: torch.relu(m.q(x).view(4, -1)) + torch.tanh(m.k(x).view(4, -1)),
    "view of a view": lambda m, x: m.q(x).unsqueeze(0).view(4, -1) + m.k(x).unsqueeze(0).view(4, -1),
    "view_as": lambda m, x: m.q(x).view_as(x.reshape(4, -1)) + m.k(x).view_as(x.reshape(4, -1)),
    "no conversion": lambda m, x: m.q(x).double().view(4, -1) + m.k(x).double().view(4, -1),
    "no dropout": lambda m, x: F.dropout(m.q(x), 0.1, False).view(4, -1) + F.dropout(m.k(x), 0.1, False).view(4, -1),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("aot", [True, False])
def test_uses_that_depend_on_strides(name: str, aot: bool) -> None:
    with torch.no_grad():
        model, x = Of(USES[name], **layers()).double(), torch.randn(4, 6, 8).double()
        rewritten = Rewritten(model, APART, aot)
        torch.testing.assert_close(rewritten(x), model(x))
    assert rewritten.titles == []


def test_a_custom_operator_may_depend_on_strides() -> None:
    model, x = Of(lambda m, x: flat(m.q(x)) + flat(m.k(x)), **layers()), torch.randn(4, 6, 8)
    rewritten = Rewritten(model, APART)
    with torch.no_grad():
        torch.testing.assert_close(rewritten(x), model(x))
    assert rewritten.titles == []


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.relu(m.q(x)) * m.k(x).softmax(-1),
        lambda m, x: m.q(x).reshape(4, -1) + m.k(x).flatten(1),
        lambda m, x: m.q(x).view(-1, 2, 4).transpose(0, 1).contiguous().view(-1) + m.k(x).chunk(2)[0].sum(),
        lambda m, x: m.q(x).view(24, 8) @ m.k(x).permute(2, 0, 1).reshape(8, -1),
    ],
)
def test_uses_that_do_not_depend_on_strides(function: Any) -> None:
    assert_same_step(Of(function, **layers()), torch.randn(4, 6, 8), ["linear (2 as one)"] * 2, aot=True)


def caches(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.cache = torch.relu(m.k(x)).detach()
    return torch.relu(m.q(x)) + m.cache


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.relu(m.q(x)) * F.softmax(m.k(x), -1).argmax(-1, keepdim=True),
        lambda m, x: torch.relu(m.q(x)) * torch.tanh(m.k(x)).detach(),
        lambda m, x: torch.relu(m.q(x)) * F.normalize(m.k(x)).detach(),
        lambda m, x: torch.relu(m.q(x)) * (torch.sigmoid(m.k(x)) > 0.5),
        caches,
    ],
)
def test_a_layer_without_gradients_still_has_none(function: Any) -> None:
    """Not gradients of 0, with which an optimizer's weight decay would move its weights."""
    model = Of(function, **layers())
    rewritten = Rewritten(model, APART, aot=True)
    rewritten(torch.randn(4, 6, 8)).sum().backward()
    assert [name for name, one in model.named_parameters() if one.grad is None] == ["k.weight", "k.bias"]
    assert rewritten.titles == []


def test_results_of_frozen_layers_have_no_gradients() -> None:
    q, k, x = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 6, 8)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(q(x)), torch.tanh(k(x))

    rewritten = Rewritten(forward, APART, aot=True)
    assert [one.requires_grad for one in rewritten(x)] == [True, False]
    assert rewritten.titles == []
    rewritten(x.requires_grad_())
    assert rewritten.titles == ["linear (2 as one)"] * 2


def test_pairs_of_values_as_complex_numbers() -> None:
    """Columns of an even layer begin at an odd one, in rows of odd length."""
    model = Of(
        lambda m, x: torch.view_as_complex(m.b(x).view(6, -1, 2)).abs() + m.a(x).sum(-1, keepdim=True),
        a=nn.Linear(8, 7), b=nn.Linear(8, 6),
    )  # fmt: skip
    assert_same_step(model, torch.randn(6, 8), [])


def test_views_of_two_aliases_in_one_operation() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = m.q(x)
        late = q[:, :, :].reshape(24, 8).view(4, 6, 8).view(24, 8)
        return torch.broadcast_tensors(q.view(24, 8), late)[1].view(-1) + m.k(x).sum()

    assert_same_step(Of(forward, **layers()), torch.randn(4, 6, 8), [])


def test_views_that_are_not_possible_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Rotary embeddings by complex numbers."""
    model = Of(lambda m, x: torch.view_as_complex((m.q(x) * m.k(x)).view(4, 6, 4, 2)).real, **layers())
    complexes = Of(lambda m, x: torch.view_as_complex(m.q(x).view(4, 6, 4, 2)).real + m.k(x).sum(), **layers())
    for one in (model, complexes):
        assert_same_step(one, torch.randn(4, 6, 8))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("biases", [(True, False, True), (False, True, False), (False, False, False)])
@pytest.mark.parametrize("aot", [True, False])
def test_layers_without_a_bias_beside_others(biases: tuple[bool, ...], aot: bool) -> None:
    """As the key of Whisper and BEiT."""
    made = {name: nn.Linear(8, 8, bias=bias) for name, bias in zip("qkv", biases, strict=True)}
    model = Of(lambda m, x: F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)), **made)
    assert_same_step(model, torch.randn(4, 6, 8), ["linear (3 as one)"] * 3, aot=aot)


def test_a_layer_that_another_pattern_takes_is_not_computed_twice() -> None:
    """As in a dueling network: a head beside a small MLP."""
    model = Of(lambda m, x: m.v(x) + m.b(F.relu(m.a(x))), v=nn.Linear(8, 1), a=nn.Linear(8, 8), b=nn.Linear(8, 4))
    assert_same_step(model, torch.randn(5, 8), ["linear + relu + linear"])
    three = Of(
        lambda m, x: m.q(x) * m.k(x).tanh() + m.b(F.relu(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 8), **layers()
    )
    assert_same_step(three, torch.randn(5, 8), ["linear + relu + linear"])
