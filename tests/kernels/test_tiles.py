"""The device math of the activations against float64, on ordinary values, near zero and at the edges of fp32."""

from __future__ import annotations

import math
import os

import pytest
import torch

from onelaunch.activations import ACTIVATIONS
from tests.conftest import TOLERANCE

EDGES = [0.0, -0.0, 3.0, -3.0, 20.0, -20.0, 20.5, 50.0, -50.0, 100.0, -100.0, math.inf, -math.inf, math.nan]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter: overflow to infinity is intended
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_derivatives(kernel_device: torch.device, name: str) -> None:
    """A NaN or infinity is expected where PyTorch has one; gelu and gelu_tanh are not defined at infinities."""
    from tests.kernels.compile_all import activation_kernel

    values = torch.cat((torch.tensor(EDGES), torch.linspace(-12, 12, 90), torch.linspace(-0.01, 0.01, 24)))
    z = values[:128].to(kernel_device)
    exact = values[:128].double().requires_grad_()
    expected = ACTIVATIONS[name].make_module()(exact)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    compared = exact.isfinite() if name.startswith("gelu") else ~exact.isnan()
    rtol, atol = TOLERANCE[torch.float32]
    for from_output in {False, not ACTIVATIONS[name].saves_input}:
        y, slope = torch.full_like(z, 9.0), torch.full_like(z, 9.0)
        activation_kernel[(1,)](z, y, slope, name, from_output)
        assert y[len(EDGES) - 1].isnan()
        for found, other in ((y, expected), (slope, expected_slope)):
            found, other = found.cpu().double()[compared], other.detach()[compared]
            torch.testing.assert_close(found, other, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", ["elu", "selu", "softplus", "tanh"])
def test_small_results_keep_their_digits(kernel_device: torch.device, name: str) -> None:
    """A relative error of 1e-5, also where exp(z) - 1 or 1 + exp(z) would cancel."""
    from tests.kernels.compile_all import activation_kernel

    z = torch.logspace(-12, -0.5, 128, device=kernel_device) * (-1 if name != "softplus" else 1)
    z = z.log() if name == "softplus" else z
    y, slope = torch.empty_like(z), torch.empty_like(z)
    activation_kernel[(1,)](z, y, slope, name, False)
    expected = ACTIVATIONS[name].value(z.cpu().double())
    torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=0)


def test_an_unknown_name_is_refused_at_compile_time() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.kernels.compile_all import activation_kernel

        z = torch.zeros(128)
        with pytest.raises(Exception, match="unknown activation"):
            activation_kernel[(1,)](z, z, z, "nonsense", False)
