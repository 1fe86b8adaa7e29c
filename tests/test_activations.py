"""The table of activations: every value and derivative against PyTorch's module and autograd in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from onelaunch.activation_names import ACTIVATION_NAMES
from onelaunch.activations import (
    ACTIVATIONS,
    SELU_ALPHA,
    SELU_SCALE,
    Activation,
    activate,
    activation_gradient,
    activation_gradient_from_output,
    find_activation,
    saves_input,
)
from tests.conftest import TOLERANCE
from tests.reference import ACTIVATIONS as MODULES

RTOL, ATOL = TOLERANCE[torch.float64]
EDGES = torch.tensor([0.0, -0.0, 3.0, -3.0, 20.0, -20.0, 20.5, 100.0, -100.0, math.inf, -math.inf], dtype=torch.float64)


def inputs() -> torch.Tensor:
    near_zero = torch.linspace(-1e-3, 1e-3, 21, dtype=torch.float64)
    return torch.cat((EDGES, torch.linspace(-30, 30, 601, dtype=torch.float64), near_zero))


@pytest.fixture(params=ACTIVATIONS.values(), ids=list(ACTIVATIONS))
def entry(request: pytest.FixtureRequest) -> Activation:
    return request.param


def test_value_is_that_of_the_module(entry: Activation) -> None:
    z = torch.cat((inputs(), torch.tensor([math.nan], dtype=torch.float64)))
    expected = MODULES[entry.name]()(z)
    assert expected[-1].isnan()
    torch.testing.assert_close(activate(z, entry.name), expected, rtol=0, atol=0, equal_nan=True)
    for function in entry.functions:
        torch.testing.assert_close(function(z, **entry.settings), expected, rtol=0, atol=0, equal_nan=True)


def test_derivative_is_that_of_autograd(entry: Activation) -> None:
    """At the kinks and at infinities too, wherever PyTorch's derivative is a number."""
    z = inputs().requires_grad_()
    (expected,) = torch.autograd.grad(entry.make_module()(z).sum(), z)
    z = z.detach()
    defined = ~expected.isnan()
    assert defined[z.isfinite()].all()
    found = activation_gradient(z, entry.name)
    torch.testing.assert_close(found[defined], expected[defined], rtol=RTOL, atol=ATOL)
    assert saves_input(entry.name) == (entry.derivative_from_output is None)
    if not saves_input(entry.name):
        by_output = activation_gradient_from_output(entry.value(z), entry.name)
        torch.testing.assert_close(by_output[defined], expected[defined], rtol=RTOL, atol=ATOL)


def test_second_derivative(entry: Activation) -> None:
    """`derivative` and, as a function of z, `derivative_from_output` can be differentiated again."""
    z = torch.linspace(-6.05, 6.1, 42, dtype=torch.float64, requires_grad=True)  # on no kink
    first = torch.autograd.grad(entry.make_module()(z).sum(), z, create_graph=True)[0]
    (expected,) = torch.autograd.grad(first.sum(), z)
    derivatives = [entry.derivative(z)]
    if entry.derivative_from_output is not None:
        derivatives.append(entry.derivative_from_output(entry.value(z)))
    for derivative in derivatives:
        found = torch.autograd.grad(derivative.sum(), z)[0] if derivative.requires_grad else torch.zeros_like(z)
        torch.testing.assert_close(found, expected, rtol=RTOL, atol=ATOL)


def test_no_activation_is_the_identity() -> None:
    z = inputs()
    assert torch.equal(activate(z, None), z)
    assert torch.equal(activation_gradient(z, None), torch.ones_like(z))
    assert not saves_input(None)


def test_modules_are_recognised() -> None:
    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES
    for name, entry in ACTIVATIONS.items():
        assert find_activation(entry.make_module()) is entry
        assert find_activation(MODULES[name]()) is entry
    own = type("Own", (nn.ReLU,), {})()
    for other in (nn.ELU(0.5), nn.Softplus(2.0), nn.Softplus(threshold=10.0), nn.Softmax(1), own):
        assert find_activation(other) is None, other


def test_constants_of_selu() -> None:
    value = nn.SELU()(torch.tensor([1.0, -math.inf], dtype=torch.float64))
    torch.testing.assert_close(value, torch.tensor([SELU_SCALE, -SELU_SCALE * SELU_ALPHA], dtype=torch.float64))
