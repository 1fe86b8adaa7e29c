"""The kernels of a small MLP: every element is written, at the borders of tiles and programs too."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from onelaunch.kernels.mlp import add_gradients_kernel, mlp_backward, mlp_forward
from onelaunch.kernels.mlp_shape import Shape
from onelaunch.ops.mlp import mlp_reference
from tests.conftest import TOLERANCE
from tests.kernels.conftest import kernel_cases


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "rows", "with_dx"),
    kernel_cases(
        [(8, 64, 64, 4), (16, 16, 16), (1, 1, 1), (33, 129, 15, 31), (7, 300, 2)], [1, 16, 17, 50], [True, False]
    ),
)
def test_every_element_is_written(
    device: torch.device, dtype: torch.dtype, widths: tuple[int, ...], rows: int, with_dx: bool
) -> None:
    activation, shape = "gelu" if rows % 2 else "tanh", Shape(widths, (True, *[False] * (len(widths) - 2)))
    x, dy = (torch.randn(rows, width, device=device).to(dtype) for width in (widths[0], widths[-1]))
    pairs = [*pairwise(widths)]
    weights = [(torch.randn(b, a, device=device) / a**0.5).to(dtype) for a, b in pairs]
    biases = [torch.randn(widths[1], device=device).to(dtype), *[None] * (len(pairs) - 1)]
    y, dx = torch.full_like(dy, torch.nan), torch.full_like(x, torch.nan)
    saved = x.new_full((rows, sum(widths[1:-1])), torch.nan)
    gradients = x.new_full(shape.gradients[-1:], torch.nan)
    mlp_forward(x, weights, biases, saved, y, shape, activation=activation, tf32=False)
    assert not saved.isnan().any()
    mlp_backward(
        dy, x, weights, saved, dx if with_dx else None, gradients, shape, activation=activation, tf32=False
    )  # fmt: skip
    leaves = [one.double().requires_grad_() for one in (x, biases[0], *weights) if one is not None]
    layers = [*zip(leaves[2:], [leaves[1], *[None] * (len(pairs) - 1)], strict=True)]
    expected = mlp_reference(leaves[0], layers, activation)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=5 * atol)
    expected.backward(dy.double())
    starts = shape.gradients
    found = [dx, gradients[starts[1] : starts[1] + widths[1]]]
    found += [gradients[starts[2 * i] :][: w.numel()].view(w.shape) for i, w in enumerate(weights)]
    for one, leaf in list(zip(found, leaves, strict=True))[0 if with_dx else 1 :]:
        assert leaf.grad is not None
        error = (one.double() - leaf.grad).norm() / leaf.grad.norm().clamp_min(1e-30)
        assert error < 5 * max(rtol, atol), tuple(leaf.shape)
    assert with_dx or dx.isnan().all()


@pytest.mark.parametrize("programs", [1, 16, 17, 40])
def test_sums_of_programs(kernel_device: torch.device, programs: int) -> None:
    shape = Shape((3, 85, 3), (True, False))
    starts, sizes = shape.gradients, shape.sizes
    sums = torch.randn(programs, starts[-1], device=kernel_device)
    total = torch.full(starts[-1:], torch.nan, device=kernel_device)
    grid = (-(-len(total) // 256),)
    add_gradients_kernel[grid](sums, total, programs, STARTS=starts, SIZES=sizes, PARTS=4, SUMMED=256, AT_ONCE=16)
    written = torch.zeros(len(total), dtype=torch.bool, device=kernel_device)
    for start, size in zip(starts, sizes, strict=False):
        written[start : start + size] = True
    assert not total[written].isnan().any()
    assert total[~written].isnan().all()
    torch.testing.assert_close(total[written], sums.double().sum(0).float()[written], rtol=1e-5, atol=1e-5)


def test_gradients_begin_aligned() -> None:
    shape = Shape((3, 5, 2), (True, False))
    assert shape.sizes == (15, 5, 10, 0)
    assert shape.gradients == (0, 16, 24, 40, 40)
    assert shape.hidden == (0, 5)
