"""Tensors of unusual strides: the path to the kernels must copy them or follow the strides, and write nothing else."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.ops import batch_norm
from onelaunch.ops.linear_choice import LIBRARY, Implementation, force_implementation, triton_gemm
from tests.conftest import TOLERANCE

RTOL, ATOL = TOLERANCE[torch.float32]
normalised = importlib.import_module("onelaunch.ops.batch_norm")
multiplied = importlib.import_module("onelaunch.ops.linear")


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=5 * RTOL, atol=5 * ATOL)


# Created on the device: `.to` would make them contiguous.
INPUTS = {
    "contiguous": lambda d: torch.randn(3, 6, 5, device=d),
    "channels last": lambda d: torch.randn(3, 5, 6, device=d).transpose(1, 2),
    "samples second": lambda d: torch.randn(6, 3, 5, device=d).transpose(0, 1),
    "back to front": lambda d: torch.randn(5, 6, 3, device=d).permute(2, 1, 0),
    "sliced channels last": lambda d: torch.randn(3, 4, 12, device=d).transpose(1, 2)[:, :6],
    "every other": lambda d: torch.randn(3, 6, 10, device=d)[..., ::2],
    "expanded": lambda d: torch.randn(3, 1, 5, device=d).expand(3, 6, 5),
    "two axes, transposed": lambda d: torch.randn(6, 9, device=d).t(),
    "one channel": lambda d: torch.randn(3, 1, 5, device=d),
    "one column": lambda d: torch.randn(37, 1, device=d),
    "one channel, sliced": lambda d: torch.randn(3, 4, 12, device=d)[:, 2:3],
}


@pytest.mark.parametrize("name", INPUTS)
def test_batch_norm_of_any_layout(kernel_device: torch.device, name: str) -> None:
    x = INPUTS[name](kernel_device)
    weight, bias = torch.randn(2, x.shape[1], device=kernel_device)
    options = (True, 1e-5, "tanh", 0.0)
    y, statistics, bits = normalised._forward_cuda(x, None, None, weight, bias, *options)
    exact = x.double().requires_grad_()
    expected = torch.tanh(F.batch_norm(exact, None, None, weight.double(), bias.double(), True))
    close(y.double(), expected)
    dy = torch.randn(x.shape, device=kernel_device)
    dx, _ = normalised._backward_cuda(dy, x, statistics, bits, weight, bias, True, "tanh", 0.0)
    (expected_dx,) = torch.autograd.grad(expected, exact, dy.double())
    close(dx.double(), expected_dx)
    assert dx.stride() == y.stride()


STRIPS = {
    "[::2]": lambda n, d: torch.randn(2 * n, device=d)[::2],
    "expanded": lambda n, d: torch.randn(64, device=d)[:1].expand(n),
}


@pytest.mark.parametrize("name", STRIPS)
def test_parameters_of_any_stride(kernel_device: torch.device, name: str) -> None:
    x = torch.randn(9, 6, device=kernel_device)
    weight, bias = STRIPS[name](6, kernel_device), STRIPS[name](6, kernel_device)
    y, statistics, bits = normalised._forward_cuda(x, None, None, weight, bias, True, 1e-5, "tanh", 0.0)
    exact, scale = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.tanh(F.batch_norm(exact, None, None, scale, bias.double(), True))
    close(y.double(), expected)
    dy = torch.randn_like(x)
    dx, sums = normalised._backward_cuda(dy, x, statistics, bits, weight, bias, True, "tanh", 0.0)
    for ours, theirs in zip((dx, sums[1]), torch.autograd.grad(expected, (exact, scale), dy.double()), strict=True):
        close(ours.double(), theirs)


@pytest.mark.parametrize("name", STRIPS)
@pytest.mark.parametrize("implementation", [LIBRARY, triton_gemm(16, 16, 16, 4, 1)], ids=lambda one: one.name)
def test_a_bias_of_any_stride(kernel_device: torch.device, name: str, implementation: Implementation) -> None:
    x, weight = torch.randn(7, 32, device=kernel_device), torch.randn(16, 32, device=kernel_device)
    bias = STRIPS[name](16, kernel_device)
    with force_implementation(implementation):
        y = multiplied._forward_cuda(x, weight, bias, "relu", 0.0, True)[0]
    expected = F.relu(F.linear(x.double(), weight.double(), bias.double()))
    rtol, atol = TOLERANCE[torch.bfloat16]  # tf32 on a GPU rounds the operands; a wrong bias is off by 1 or more
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=atol)


def test_strided_running_statistics_are_updated_in_place(kernel_device: torch.device) -> None:
    x = torch.randn(9, 6, device=kernel_device)
    held = torch.stack((torch.zeros(12), torch.ones(12))).to(kernel_device)
    mean, var = held[:, ::2]
    expected_mean, expected_var = mean.clone(), var.clone()
    batch_norm(x, mean, var, training=True)
    F.batch_norm(x, expected_mean, expected_var, training=True)
    close(mean, expected_mean)
    close(var, expected_var)
    assert torch.equal(held[:, 1::2].cpu(), torch.stack((torch.zeros(6), torch.ones(6))))
