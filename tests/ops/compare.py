"""An op against autograd of its reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tests.conftest import TOLERANCE


def float64_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in tensors]


def assert_same_with_gradients(
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    reference: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    upstream: torch.Tensor | None = None,
) -> None:
    """Compare values by element and gradients by the norm of their error, which grows with the number of rows summed over."""
    rtol, atol = TOLERANCE[dtype]
    exact = float64_copies(inputs)
    expected = reference(*exact)
    torch.testing.assert_close(output.double(), expected, rtol=rtol, atol=5 * atol)
    if upstream is None:
        upstream = torch.randn_like(output)
    output.backward(upstream)
    expected.backward(upstream.double())
    for index, (tensor, other) in enumerate(zip(inputs, exact, strict=True)):
        if tensor.requires_grad:
            assert tensor.grad is not None
            assert other.grad is not None
            assert tensor.grad.dtype == tensor.dtype
            error = (tensor.grad.double() - other.grad).norm() / other.grad.norm().clamp_min(1e-30)
            assert error < 5 * max(rtol, atol), f"gradient of input {index}: {error:.2e}"
