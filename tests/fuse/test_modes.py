"""Operations in different modes stay apart: with and without gradients, under autocast and outside it, inside vmap."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.fuse.rewritten import Of, Rewritten

X, TARGET = torch.randn(8, 6), torch.randint(6, (8,))


def autocast(enabled: bool = True) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16, enabled=enabled)


def assert_same(forward: Callable[..., torch.Tensor], titles: list[str], **parts: nn.Module) -> None:
    """Types, values and gradients, and which parameters have none, as those of the model that is not rewritten."""
    parts = parts or {"a": nn.Linear(6, 6), "b": nn.Linear(6, 6)}
    model = Of(forward, **parts)
    other = copy.deepcopy(model)
    rewritten = Rewritten(model)
    got, expected = rewritten(X), other(X)
    assert rewritten.titles == titles
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected)
    got.sum().backward()
    expected.sum().backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None), name
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, msg=name)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_student_and_its_teacher(frozen: bool, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with mode():
            wanted = m.teacher(x)
        return F.mse_loss(m.student(x), wanted.clone() + 1)

    student = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    teacher = copy.deepcopy(student).requires_grad_(not frozen)
    assert_same(forward, ["linear + tanh + linear"] * 2, teacher=teacher, student=student)


def test_layers_on_both_sides_of_another_mode_are_one_product() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        first = m.a(x)
        with torch.no_grad():
            scale = x.sum()
        with autocast():
            low = x @ x.T
        return first * m.b(x) * scale + low.float().sum()

    assert_same(forward, ["linear (2 as one)"] * 2)


def test_groups_of_layers_with_one_input_have_a_product_each() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            fixed = m.a(x) * m.b(x)
        return m.a(x) * m.b(x) + fixed + F.linear(x, m.a.weight) * F.linear(x, m.b.weight)

    assert_same(forward, ["linear (2 as one)"] * 2 + ["linear (4 as one)"] * 4)


@pytest.mark.parametrize("enabled", [True, False])
def test_layers_in_and_outside_autocast(enabled: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast(not enabled):
            first = m.a(x)
        with autocast(enabled):
            second = m.b(x)
        return first.float() * second.float()

    assert_same(forward, [])


def test_an_activation_without_gradients_of_a_layer_with_them() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m.a(x)
        with torch.no_grad():
            gate = torch.relu(hidden)
        return gate * m.b(x + 1).sum()

    assert_same(forward, [])


def test_a_layer_whose_result_is_detached_has_no_gradient() -> None:
    assert_same(lambda m, x: m.a(x).detach() * m.b(x), [])
    assert_same(lambda m, x: m.a(x).chunk(2, 1)[0].repeat(1, 2) * m.b(x), ["linear (2 as one)"] * 2)


def head_in_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        logits = m.a(x)
    return F.cross_entropy(logits.float(), TARGET)


def loss_without_autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with autocast():
        logits = m.a(x)
        with autocast(False):
            return F.cross_entropy(logits.float(), TARGET)


def fixed_head(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = m.a(x)
    return F.cross_entropy(logits, TARGET) + m.b(x).sum()


@pytest.mark.parametrize("forward", [head_in_autocast, loss_without_autocast, fixed_head])
def test_a_head_and_a_loss_in_different_modes(forward: Callable[..., torch.Tensor]) -> None:
    assert_same(forward, [])


def gated(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(m.a(x)) * m.b(x)


def dual(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(gated(m, torch.autograd.forward_ad.make_dual(x, x))).tangent


TRANSFORMED: dict[str, Callable[..., torch.Tensor]] = {
    "vmap": lambda m, x: torch.vmap(lambda row: gated(m, row))(x),
    "in place": lambda m, x: torch.vmap(lambda row: m.a(row).relu_())(x),
    "not batched": lambda m, x: torch.vmap(lambda row: row * gated(m, x).sum())(x),
    "grad": lambda m, x: torch.func.grad(lambda row: gated(m, row).sum())(x),
    "grad of each": lambda m, x: torch.vmap(torch.func.grad(lambda row: gated(m, row).sum()))(x),
    "jvp": lambda m, x: torch.func.jvp(lambda row: gated(m, row), (x,), (x,))[1],
    "dual": dual,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_nothing_is_replaced_inside_a_transformation(name: str) -> None:
    """Behind it the layers are one product, as they are without it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return gated(m, TRANSFORMED[name](m, x) + 1)

    assert_same(forward, ["linear (2 as one)"] * 2)
    explanation = ol.explain(Of(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)), X)
    assert explanation.operations[-1].name == "mul"
    assert explanation.operations[-1].shape == (8, 6)


def test_nested_tensors_are_left_alone() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 6), torch.randn(5, 6)], layout=torch.jagged)
    model = Of(gated, a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    rewritten = Rewritten(model)
    torch.testing.assert_close(rewritten(nested).values(), model(nested).values())
    assert rewritten.titles == []
    explanation = ol.explain(model, nested)
    assert [operation.shape for operation in explanation.operations] == [(8, 6)] * 4
    assert explanation.operations[1].cost.bytes > 2 * 8 * 6 * 4  # forward and backward
