"""Small MLPs as one op: what is one, what is not, and that it computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.activations import ACTIVATIONS
from onelaunch.fuse.patterns.mlp import MAX_LAYERS, MAX_ROWS, MAX_WIDTH
from tests.fuse.rewritten import Of, Rewritten, assert_same_step, titles_of


def network(*widths: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def title(layers: int, activation: str = "relu") -> str:
    return " + ".join(["linear", *[activation, "linear"] * (layers - 1)])


@pytest.mark.parametrize("aot", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_activation(name: str, aot: bool) -> None:
    model = network(5, 7, 6, 3, activation=ACTIVATIONS[name].make_module, bias=aot)
    assert_same_step(model, torch.randn(8, 5), [title(3, name)], aot=aot)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5)])
def test_inputs_of_any_rank(shape: tuple[int, ...]) -> None:
    assert_same_step(network(5, 7, 3), torch.randn(shape), [title(2)], aot=True)


def test_activations_in_place_and_dropout_in_evaluation() -> None:
    model = Of(lambda m, x: m.b(F.relu(m.a(x), inplace=True)).sigmoid_(), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    assert_same_step(model, torch.randn(5, 6), [title(2)])
    layers = [nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 4)]
    assert_same_step(nn.Sequential(*layers).eval(), torch.randn(5, 6), [title(2, "tanh")], aot=True)


def test_a_trailing_activation_stays() -> None:
    model = nn.Sequential(*network(5, 7, 3, activation=nn.Tanh), nn.Tanh())
    assert_same_step(model, torch.randn(8, 5), [title(2, "tanh")], aot=True)


def test_an_actor_and_a_critic_of_one_body() -> None:
    """The body's last value has two users; each head by itself is a small MLP."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.body(x))
        return m.actor(h).log_softmax(-1).sum() + m.critic(h).square().mean()

    model = Of(
        forward, body=network(4, 8, 8, activation=nn.Tanh), actor=network(8, 6, 2), critic=network(8, 6, 1)
    )  # fmt: skip
    assert_same_step(model, torch.randn(9, 4), [title(2, "tanh"), title(2), title(2)], aot=True)


def test_what_is_no_small_mlp() -> None:
    between = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 6))
    mixed = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    assert titles_of(between, torch.randn(5, 6)) == ["linear + relu + dropout"]
    assert titles_of(mixed, torch.randn(5, 6)) == [title(2)]
    used = Of(lambda m, x: (h := F.relu(m.a(x))) + m.b(h), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    assert titles_of(used, torch.randn(5, 6)) == ["linear + relu"]
    assert title(2) not in titles_of(network(6, MAX_WIDTH + 1, 2), torch.randn(5, 6))
    assert titles_of(network(*[4] * (MAX_LAYERS + 1)), torch.randn(5, 4)) == [title(MAX_LAYERS)]
    assert title(MAX_LAYERS + 1) not in titles_of(network(*[4] * (MAX_LAYERS + 2)), torch.randn(5, 4))
    computed = Of(lambda m, x: F.linear(F.relu(m.a(x)), m.a.weight * 2), a=nn.Linear(6, 6))
    assert titles_of(computed, torch.randn(5, 6)) == ["linear + relu"]


def test_a_weight_changed_between_two_layers() -> None:
    """The op would read the second weight where the first layer stands, or the input where the last one does."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        h = F.relu(m.a(x))
        x.add_(1)
        return m.b(h) + x

    model, x = Of(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), torch.randn(5, 6)
    with torch.no_grad():  # autograd would refuse the change
        rewritten = Rewritten(model)
        torch.testing.assert_close(rewritten(x), forward(model, x))
    assert title(2) not in rewritten.titles


@pytest.mark.parametrize("aot", [True, False])
def test_a_weight_of_two_layers_changed_between_them(aot: bool) -> None:
    class FastWeights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.relu(F.linear(x, self.w))
            self.w.add_(0.1)
            return F.linear(h, self.w)

    model, x = FastWeights(), torch.randn(3, 4)
    other, rewritten = copy.deepcopy(model), Rewritten(model, aot=aot)
    torch.testing.assert_close(rewritten(x), other(x))
    assert title(2) not in rewritten.titles


@pytest.mark.parametrize("widths", [(4, 8, 4), (4, 4)])
def test_a_residual_in_place_around_a_frozen_network(widths: tuple[int, ...]) -> None:
    """The gradients of a frozen network do not need its input, nor does the compiled code keep it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        h += m.frozen(h).tanh()
        return h

    model = Of(forward, first=nn.Linear(4, 4), frozen=network(*widths).requires_grad_(False))
    other, x = copy.deepcopy(model), torch.randn(5, 4)
    rewritten = Rewritten(model, aot=True)
    rewritten(x).sum().backward()
    other(x).sum().backward()
    assert rewritten.titles == [title(2) if len(widths) == 3 else "linear + tanh"]
    gradients = [[one.grad for one in each.parameters() if one.requires_grad] for each in (model, other)]
    torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_outputs_is_explained() -> None:
    assert "linear" in str(ol.explain(network(5, 4, 0), torch.randn(3, 5)))


def test_frozen_layers_have_no_gradients() -> None:
    model = network(5, 7, 3)
    model[0].requires_grad_(False)
    other, x = copy.deepcopy(model), torch.randn(8, 5)
    Rewritten(model, aot=True)(x).sum().backward()
    other(x).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        if two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)


def test_autocast() -> None:
    model, x = network(6, 12, 12, 4, activation=nn.Softplus), torch.randn(16, 6)
    rewritten = Rewritten(model, aot=True)
    with torch.autocast("cpu", torch.bfloat16):
        got, expected = rewritten(x), model(x)
    assert rewritten.titles == [title(3, "softplus")]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1.6e-2, atol=5e-2)
    got.sum().backward()
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize(
    ("rows", "dtype", "pays"),
    [(256, torch.float32, True), (MAX_ROWS, torch.bfloat16, True), (MAX_ROWS + 1, torch.bfloat16, False),
     (256, torch.float64, False)],
)  # fmt: skip
def test_where_it_may_pay(rows: int, dtype: torch.dtype, pays: bool) -> None:
    model = network(8, 64, 64, 4).to("meta", dtype)
    rewritten = Rewritten(model)
    rewritten(torch.randn(rows, 8, device="meta", dtype=dtype))
    (match,) = rewritten.matches
    assert match.pattern.name == "mlp"
    assert match.pattern.pays(match) == pays
