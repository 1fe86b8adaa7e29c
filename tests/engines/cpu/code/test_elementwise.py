"""Every activation of the table, as native code, against PyTorch: value, derivative, and derivative from the output."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from onelaunch.activations import ACTIVATIONS
from onelaunch.engines import cpu
from onelaunch.engines.cpu.code import elementwise
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.plan.target import Target, host
from onelaunch.run.network import Activation, Dropout
from tests.conftest import TOLERANCE
from tests.engines.cpu.native_functions import Array, Emit, VectorFunctions, runnable_targets

POINTS = np.concatenate([np.linspace(-30, 30, 20001), np.geomspace(1e-8, 1, 1001), -np.geomspace(1e-8, 1, 1001)])
# PyTorch's derivative of gelu, gelu_tanh and silu is NaN at an infinity; ours is their limit.
LIMITS_AT_INFINITY = ("gelu", "gelu_tanh", "silu")
SLOPE = 0.01


def operation(name: str) -> Activation:
    return Activation(name, SLOPE) if name == "leaky_relu" else Activation(name)


def operations(f: Function, name: str) -> elementwise.Operations:
    """The operation in a function of its own, with the values of its fields as constants."""
    f.arguments |= {"parameter0": f.scalar(SLOPE), "limit0": f.i64(0)}
    return elementwise.Operations(f, elementwise.Group((name,)))


def emitters(name: str) -> dict[str, Emit]:
    found: dict[str, Emit] = {
        name: lambda f, x: operations(f, name).forward(x),
        f"{name}_derivative": lambda f, x: operations(f, name).forward_with_derivative(x, ())[1],
    }
    if not ACTIVATIONS[name].saves_input:
        found[f"{name}_from_output"] = lambda f, a: operations(f, name).backward_from_output(f.constant(1.0), a)
    return found


@functools.cache
def compiled(target: Target) -> VectorFunctions:
    found = {key: emit for name in ACTIVATIONS for key, emit in emitters(name).items()}
    return VectorFunctions(found, target)


def assert_close(got: Array, expected: torch.Tensor, scale: float | Array = 1.0) -> None:
    relative, absolute = TOLERANCE[torch.float32]
    np.testing.assert_allclose(got / scale, expected.numpy() / scale, rtol=relative, atol=absolute)


@pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_value_and_derivatives(name: str, target: Target) -> None:
    entry, native = ACTIVATIONS[name], compiled(target)
    x = torch.from_numpy(POINTS).float()
    exact = x.double()
    # x times a gate that float32 rounds near zero, as 1 + erf(x) is: the product's error grows with x.
    scale = np.maximum(1, abs(POINTS)) if name in ("gelu", "gelu_tanh") else 1.0
    assert_close(native(name, x.numpy()), entry.value(exact), scale)
    assert_close(native(f"{name}_derivative", x.numpy()), entry.derivative(exact), scale)
    if entry.derivative_from_output:
        output = entry.value(x)
        assert_close(native(f"{name}_from_output", output.numpy()), entry.derivative_from_output(output.double()))


@pytest.mark.parametrize("name", ["elu", "selu", "softplus", "mish"])
def test_small_results_keep_their_digits(name: str) -> None:
    """Relative accuracy where the result is far below 1: the absolute tolerance would hide a loss of digits."""
    x = -np.geomspace(1e-6, 80, 2001).astype(np.float32)
    expected = ACTIVATIONS[name].value(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(compiled(host())(name, x), expected, rtol=5e-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_and_infinities_behave_as_in_pytorch(name: str) -> None:
    points = [math.nan] if name in LIMITS_AT_INFINITY else [math.nan, math.inf, -math.inf, -3.0, 3.0, 20.0]
    x = torch.tensor(points).repeat_interleave(32).requires_grad_()
    value = ACTIVATIONS[name].value(x)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    native = compiled(host())
    assert_close(native(name, x.detach().numpy()), value.detach())
    assert_close(native(f"{name}_derivative", x.detach().numpy()), gradient)


def test_the_engine_declares_the_activations_it_has() -> None:
    def has(name: str) -> bool:
        try:
            Module(host()).function("f", "ptr %x", lambda f: operations(f, name).forward(f.zero) and None)
        except AssertionError:
            return False
        return True

    assert {name for name in [*ACTIVATIONS, "unknown"] if has(name)} == cpu.ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_is_read_off_the_output_where_the_table_says_so(name: str) -> None:
    assert elementwise.derivative_from_output([operation(name)]) == (not ACTIVATIONS[name].saves_input)


def test_groups_whose_output_determines_the_derivative() -> None:
    relu, dropout, steep = Activation("relu"), Dropout(0.5, 0), Activation("leaky_relu", -0.1)
    assert elementwise.derivative_from_output([])
    assert elementwise.derivative_from_output([relu, dropout])
    for group in ([dropout], [relu, relu], [dropout, relu], [Activation("tanh"), dropout], [steep]):
        assert not elementwise.derivative_from_output(group)
