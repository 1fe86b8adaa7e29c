"""Layer norm's backward pass: the kernel against autograd in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onelaunch.ops.layer_norm import layer_norm, layer_norm_backward
from tests.conftest import TOLERANCE

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (3, 7), (2000, 768), (17, 5, 129), (5, 8192), (0, 6)])
def test_gradients_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(2)
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype).requires_grad_()
    weight, bias = ((torch.randn(shape[-1], device=device)).to(dtype).requires_grad_() for _ in range(2))
    upstream = torch.randn(shape, device=device).to(dtype)
    exact = [one.detach().double().requires_grad_() for one in (x, weight, bias)]
    expected = F.layer_norm(exact[0], shape[-1:], exact[1], exact[2], 1e-5)
    found = layer_norm(x, weight, bias, 1e-5)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=rtol, atol=10 * atol)
    gradients = torch.autograd.grad(found, (x, weight, bias), upstream)
    right = torch.autograd.grad(expected, exact, upstream.double())
    scales = (1.0, *(max(1.0, len(upstream.reshape(-1, shape[-1])) ** 0.5),) * 2)  # of a sum over rows
    for one, two, scale in zip(gradients, right, scales, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=rtol, atol=10 * atol * scale)


def test_the_op_follows_the_rules_of_custom_ops() -> None:
    x, dy = torch.randn(4, 6), torch.randn(4, 6)
    torch.library.opcheck(layer_norm_backward, (dy, x, x.mean(1), 1 / x.std(1), torch.rand(6)))
