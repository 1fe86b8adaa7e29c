"""Layer norm and RMS norm: the kernels against float64, with and without each optional part."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TOLERANCE
from tests.kernels.conftest import kernel_cases
from tests.kernels.reference import KEY, keep_mask, poisoned, unpacked

SHAPES = [(1, 1), (3, 7), (70, 5), (5, 136), (2, 1031)]


@pytest.mark.parametrize(
    ("kernel_device", "dtype", "shape", "centered", "p", "with_residual", "affine", "with_dsum"),
    kernel_cases(SHAPES, [True, False], [0.0, 0.3, 1.0], [True, False], ["both", "weight", "none"], [True, False]),
)
def test_values_statistics_and_gradients(
    kernel_device: torch.device, dtype: torch.dtype, shape: tuple[int, int], centered: bool, p: float,
    with_residual: bool, affine: str, with_dsum: bool,
) -> None:  # fmt: skip
    from onelaunch.kernels.norm import norm_forward
    from onelaunch.kernels.norm_backward import norm_backward

    rows, units = shape
    x = torch.randn(shape, device=kernel_device, dtype=dtype)
    weight = torch.randn(units, device=kernel_device, dtype=dtype) if affine != "none" else None
    bias = torch.randn(units, device=kernel_device, dtype=dtype) if affine == "both" and centered else None
    residual = torch.randn(shape, device=kernel_device, dtype=dtype) if with_residual else None
    summed = with_residual or p > 0
    y = poisoned(*shape, like=x)
    s = poisoned(*shape, like=x) if summed else None
    statistics = poisoned(1 + centered, rows, like=x, dtype=torch.float32)
    bits = poisoned(rows, -(-units // 8), like=x, dtype=torch.uint8) if p else None
    norm_forward(x, residual, weight, bias, y, s, statistics, bits, eps=1e-3, p=p, key=KEY, centered=centered)

    keep, scale = keep_mask(rows, units, p), 0.0 if p == 1 else 1 / (1 - p)
    if bits is not None:
        assert torch.equal(unpacked(bits, units), keep)
    exact_sum = torch.where(keep, x.cpu().double() * scale, 0) if p else x.cpu().double()
    exact_sum = exact_sum if residual is None else exact_sum + residual.cpu().double()
    rtol, atol = TOLERANCE[dtype]
    if s is not None:
        torch.testing.assert_close(s.cpu().double(), exact_sum, rtol=rtol, atol=atol)
    exact = (x if s is None else s).cpu().double().requires_grad_()  # what is normalised is the sum as stored
    leaves = [exact, *(one.cpu().double().requires_grad_() for one in (weight, bias) if one is not None)]
    mean = exact.mean(1, keepdim=True) if centered else torch.zeros(rows, 1)
    rstd = ((exact - mean).square().mean(1, keepdim=True) + 1e-3).rsqrt()
    expected = (exact - mean) * rstd
    expected = expected if weight is None else expected * leaves[1]
    expected = expected if bias is None else expected + leaves[2]
    torch.testing.assert_close(y.cpu().double(), expected, rtol=rtol, atol=5 * atol)
    found = [rstd, mean] if centered else [rstd]
    torch.testing.assert_close(
        statistics.cpu().double(), torch.stack([one[:, 0] for one in found]), rtol=1e-5, atol=1e-6
    )

    dy = torch.randn_like(x)
    dsum = torch.randn_like(x) if with_dsum else None
    dx, sums = poisoned(*shape, like=x), poisoned(len(leaves) - 1, units, like=x)
    dresidual = poisoned(*shape, like=x) if with_residual and p else None
    norm_backward(
        dy, dsum, x if s is None else s, statistics, weight, bits, dx, dresidual, sums, p=p, centered=centered
    )
    total, *others = torch.autograd.grad(expected, leaves, dy.cpu().double())
    total = total if dsum is None else total + dsum.cpu().double()
    tolerance = {"rtol": 5 * rtol, "atol": 5 * atol * max(1.0, rstd.max().item())}
    torch.testing.assert_close(dx.cpu().double(), torch.where(keep, total * scale, 0) if p else total, **tolerance)
    if dresidual is not None:
        torch.testing.assert_close(dresidual.cpu().double(), total, **tolerance)
    for one, other in zip(sums.cpu().double(), others, strict=True):
        torch.testing.assert_close(one, other, rtol=5 * rtol, atol=5 * atol * rows**0.5)


def test_more_rows_than_programs(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from onelaunch.kernels import norm_backward

    monkeypatch.setattr(norm_backward, "PROGRAMS", 2)
    monkeypatch.setattr(norm_backward, "TILE_ELEMENTS", 32)
    x, dy = torch.randn(2, 13, 12, device=kernel_device)
    rstd = x.square().mean(1).rsqrt()[None]
    dx, sums = poisoned(13, 12, like=x), poisoned(2, 12, like=x)
    weight = torch.ones(12, device=kernel_device)
    norm_backward.norm_backward(dy, None, x, rstd, weight, None, dx, None, sums, p=0.0, centered=False)
    torch.testing.assert_close(sums, torch.stack([(dy * x * rstd[0, :, None]).sum(0), dy.sum(0)]), rtol=1e-5, atol=1e-5)
    normalised = x * rstd[0, :, None]
    expected = (dy - normalised * (normalised * dy).mean(1, keepdim=True)) * rstd[0, :, None]
    torch.testing.assert_close(dx, expected, rtol=1e-5, atol=1e-5)


def test_unlike_types_are_added_in_fp32_and_nothing_is_saved_without_a_backward_pass(
    kernel_device: torch.device,
) -> None:
    from onelaunch.kernels.norm import norm_forward

    x, residual = torch.randn(4, 24, device=kernel_device).half(), torch.randn(4, 24, device=kernel_device)
    s, y = poisoned(4, 24, like=residual), poisoned(4, 24, like=residual)
    options = {"eps": 1e-5, "p": 0.0, "key": KEY, "centered": True}
    norm_forward(x, residual, None, None, y, s, None, None, **options)
    assert torch.equal(s, x + residual)
    again = poisoned(4, 24, like=residual)
    norm_forward(x, residual, None, None, again, None, None, None, **options)
    assert torch.equal(again, y)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(s, (24,)), rtol=1e-5, atol=1e-5)


def test_the_mask_does_not_depend_on_the_tile(kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from onelaunch.kernels import norm

    x = torch.ones(9, 40, device=kernel_device)
    masks = []
    for smallest in (64, 512):
        monkeypatch.setattr(norm, "SMALLEST_TILE", smallest)
        bits = poisoned(9, 5, like=x, dtype=torch.uint8)
        y, s = poisoned(9, 40, like=x), poisoned(9, 40, like=x)
        norm.norm_forward(x, None, None, None, y, s, None, bits, eps=1e-5, p=0.5, key=KEY, centered=True)
        assert torch.equal(unpacked(bits, 40), s.cpu() != 0)
        masks.append(bits)
    assert torch.equal(masks[0], masks[1])
