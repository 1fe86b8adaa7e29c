"""A whole small MLP as one op, against the same layers in float64."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from onelaunch.activations import ACTIVATIONS
from onelaunch.errors import OnelaunchError
from onelaunch.ops.mlp import mlp, mlp_op, mlp_reference
from tests.ops.compare import assert_same_with_gradients
from tests.ops.conftest import DTYPES
from tests.pairwise import cases

Case = tuple[Tensor, list[Tensor], list[Tensor | None]]


def arguments(
    device: Any, dtype: torch.dtype, widths: tuple[int, ...], rows: tuple[int, ...], biased: bool = True
) -> Case:
    def leaf(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype).requires_grad_()

    pairs = [*pairwise(widths)]
    weights = [leaf(outputs, inputs, scale=inputs**-0.5) for inputs, outputs in pairs]
    biases = [leaf(outputs, scale=0.3) if biased or index == 1 else None for index, (_, outputs) in enumerate(pairs)]
    return leaf(*rows, widths[0], scale=1.0), weights, biases


def reference(count: int, present: list[bool], activation: str) -> Callable[..., Tensor]:
    """The same function of x, the weights and the biases that are there."""

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        weights, others = parameters[:count], iter(parameters[count:])
        biases = [next(others) if there else None for there in present]
        return mlp_reference(x, [*zip(weights, biases, strict=True)], activation)

    return function


def assert_right(case: Case, dtype: torch.dtype, activation: str) -> None:
    x, weights, biases = case
    inputs = [x, *weights, *(bias for bias in biases if bias is not None)]
    expected = reference(len(weights), [bias is not None for bias in biases], activation)
    assert_same_with_gradients(mlp(x, weights, biases, activation), inputs, expected, dtype)


@pytest.mark.parametrize(
    ("dtype", "widths", "rows", "activation", "biased"),
    cases(
        [torch.float64, *DTYPES], [(8, 64, 64, 4), (5, 100, 3), (17, 33, 16, 7, 1), (130, 200, 20)],
        [(20,), (3, 7), (1,), (256,)], ["tanh", "gelu", "silu", "elu"], [True, False],
    ),
)  # fmt: skip
def test_values_and_gradients(
    device: torch.device, dtype: torch.dtype, widths: Any, rows: Any, activation: str, biased: bool
) -> None:
    assert_right(arguments(device, dtype, widths, rows, biased), dtype, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation(device: torch.device, activation: str) -> None:
    assert_right(arguments(device, torch.float32, (6, 20, 9, 5), (40,)), torch.float32, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2049, 8193, 20000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(dtype: torch.dtype, rows: int) -> None:
    assert_right(arguments("cuda", dtype, (10, 64, 40, 3), (rows,)), dtype, "tanh")


def test_the_same_bits_every_time(device: torch.device) -> None:
    x, weights, biases = arguments(device, torch.float32, (8, 64, 64, 4), (300,))
    leaves, found = [x, *weights, *(bias for bias in biases if bias is not None)], []
    for _ in range(3):
        y = mlp(x, weights, biases, "relu")
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_inputs_of_any_strides(device: torch.device) -> None:
    x, weights, biases = arguments(device, torch.float32, (6, 16, 4), (12,))
    wide = torch.randn(12, 9, device=device)
    for given in (wide[:, 2:8], wide.new_zeros(6, 12).uniform_().t(), wide[::2, :6], x[0], x[:1].expand(5, 6)):
        turned = [weight.detach().t().contiguous().t() for weight in weights]
        expected = mlp_reference(given, [*zip(weights, biases, strict=True)], "relu")
        torch.testing.assert_close(mlp(given, turned, biases, "relu"), expected, rtol=1e-5, atol=5e-6)
    assert mlp(x[:0], weights, biases, "relu").shape == (0, 4)
    torch.autograd.grad(mlp(x[:0], weights, biases, "relu").sum(), weights)


def test_nan_and_infinity_stay(device: torch.device) -> None:
    x, weights, biases = arguments(device, torch.float32, (6, 16, 4), (12,))
    with torch.no_grad():
        x[3, 2], x[5, 0] = torch.nan, torch.inf
    found = mlp(x, weights, biases, "tanh")
    assert found[3].isnan().all()
    expected = mlp_reference(x, [*zip(weights, biases, strict=True)], "tanh")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6, equal_nan=True)


def test_gradients_of_some_inputs_only(device: torch.device) -> None:
    x, weights, biases = arguments(device, torch.float32, (6, 16, 9, 4), (12,))
    weights[0].requires_grad_(False)
    x.requires_grad_(False)
    assert_right((x, weights, biases), torch.float32, "gelu")


def test_second_derivatives(device: torch.device) -> None:
    case = arguments(device, torch.float64, (3, 5, 4, 2), (6,), biased=False)
    x, weights, biases = case
    leaves = (x, *weights, *(bias for bias in biases if bias is not None))
    function = reference(3, [bias is not None for bias in biases], "tanh")

    def ours(x: Tensor, *parameters: Tensor) -> Tensor:
        return mlp(x, parameters[:3], [None, parameters[3], None], "tanh")

    assert torch.autograd.gradgradcheck(ours, leaves)
    torch.testing.assert_close(ours(*leaves), function(*leaves))


Op = Callable[..., Tensor]
W, V, B = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 5), (5, 5), (5,)))
SHARED: dict[str, Callable[[Op, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "a weight twice": lambda f, x, w, v, b: f(x, [w, w], [None, b]),
    "a bias twice": lambda f, x, w, v, b: f(x, [w, v], [b, b]),
    "a network twice": lambda f, x, w, v, b: f(f(x, [w, v], [b, None]), [w, v], [b, None]),
    "a weight of another": lambda f, x, w, v, b: f(x, [w, w.t() * 2], [b, None]),
    "x of a weight": lambda f, x, w, v, b: f(x @ w, [w, v], [b, None]),
    "x is a weight": lambda f, x, w, v, b: f(w, [w, v], [b, None]),
}


@pytest.mark.parametrize("with_dx", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_derivatives_where_tensors_are_shared(name: str, with_dx: bool) -> None:
    """By one of the arguments, a tensor also has an influence on the others."""
    leaves = [one.clone().requires_grad_() for one in (W, V, B)]
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=with_dx)
    leaves += [x] if with_dx else []

    def found(op: Op) -> list[Tensor]:
        value = SHARED[name](op, x, *leaves[:3]).sin().sum()
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        plain = torch.autograd.grad(value, leaves, retain_graph=True, **options)
        first = torch.autograd.grad(value, leaves, create_graph=True, **options)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), leaves, **options)
        return [*plain, *first, *second]

    ours = found(lambda x, weights, biases: mlp(x, weights, biases, "tanh"))
    expected = found(lambda x, weights, biases: mlp_reference(x, [*zip(weights, biases, strict=True)], "tanh"))
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_bias_may_change_before_the_backward_pass(device: torch.device) -> None:
    """No first derivative needs it."""
    x, weights, biases = arguments(device, torch.float32, (6, 16, 4), (12,))
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    expected = torch.autograd.grad(mlp_reference(x, [*zip(weights, biases, strict=True)], "silu").sum(), leaves)
    value = mlp(x, weights, biases, "silu").sum()
    with torch.no_grad():
        leaves[-1].mul_(2)
    for one, other in zip(torch.autograd.grad(value, leaves, retain_graph=True), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=5e-6)
    with pytest.raises(RuntimeError, match=r"^biases\[1\] was changed in place after the op mlp used it"):
        torch.autograd.grad(value, leaves, create_graph=True)


def test_nothing_is_kept_after_the_backward_pass(device: torch.device) -> None:
    _, weights, biases = arguments(device, torch.float32, (6, 16, 4), (12,))
    for weight in weights:
        weight.requires_grad_(False)
    x = torch.randn(12, 6, device=device, requires_grad=True)
    hidden = x * 2
    kept, value = weakref.ref(hidden), mlp(hidden, weights, biases, "silu").sum()
    del hidden
    value.backward()
    assert kept() is None


def test_transforms(device: torch.device) -> None:
    x, weights, biases = arguments(device, torch.float32, (6, 16, 4), (12,))
    layers = [*zip(weights, biases, strict=True)]
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: mlp(row, weights, biases, "tanh")))(x)
    expected = torch.func.vmap(torch.func.jacrev(lambda row: mlp_reference(row, layers, "tanh")))(x)
    torch.testing.assert_close(jacobian, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(device: torch.device, dtype: torch.dtype) -> None:
    x, weights, biases = arguments(device, dtype, (6, 16, 4), (12,), biased=False)
    parameters = [one for pair in zip(weights, biases, strict=True) for one in pair]
    torch.library.opcheck(mlp_op, (x, [x.new_empty(0) if one is None else one for one in parameters], "silu"))


def test_autocast(device: torch.device) -> None:
    x, weights, biases = arguments(device, torch.float32, (6, 16, 4), (12,), biased=False)
    with torch.autocast(device.type, torch.bfloat16):
        y = mlp(x, weights, biases, "gelu")
    layers = [(w.double(), None if b is None else b.double()) for w, b in zip(weights, biases, strict=True)]
    expected = mlp_reference(x.double(), layers, "gelu")
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=1.6e-2, atol=8e-2)
    y.sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in weights)


MISTAKES: dict[str, tuple[Callable[[Tensor, list[Tensor], list[Any]], object], str]] = {
    "one layer": (lambda x, w, b: mlp(x, w[:1], b[:1], "relu"), "1 weights and 1 biases: pass as many"),
    "a bias too few": (lambda x, w, b: mlp(x, w, b[:1], "relu"), "2 weights and 1 biases"),
    "activation": (lambda x, w, b: mlp(x, w, b, "rule"), "activation='rule'"),
    "inputs": (lambda x, w, b: mlp(x[:, :3], w, b, "relu"), r"weights\[0\] has shape .* its input has 3 columns"),
    "widths": (lambda x, w, b: mlp(x, w[::-1], b[::-1], "relu"), r"weights\[0\] has shape"),
    "dtype": (lambda x, w, b: mlp(x, [w[0], w[1].double()], b, "relu"), r"weights\[1\] has dtype torch.float64"),
    "bias": (lambda x, w, b: mlp(x, w, [b[0], b[1][:2]], "relu"), r"weights\[1\] has shape .* its bias \(2,\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(OnelaunchError, match=message):
        call(*arguments("cpu", torch.float32, (6, 16, 4), (12,)))
