"""Layer norm and RMS norm in plain PyTorch: values and gradients, the shapes of what the ops return, the CPU path."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onelaunch.ops.dropout import bytes_for, draw_keep, pack, unpack
from onelaunch.ops.widen import widen
from onelaunch.rng import keep_scale

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # y, the sum, statistics, keep bits


def standardised(s: Tensor, eps: float, centered: bool) -> tuple[Tensor, list[Tensor]]:
    """s with unit mean square by row, in fp32 or fp64, and its statistics `[..., 1]`: rstd and, if centered, the mean."""
    wide = widen(s)
    means = [wide.mean(-1, keepdim=True)] if centered else []
    for mean in means:
        wide = wide - mean
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * rstd, [rstd, *means]


def norm_reference(s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool) -> Tensor:
    """The norm of s over its last dimension in fp32 or fp64, in differentiable PyTorch ops."""
    return _affine(standardised(s, eps, centered)[0], weight, bias)


def _affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def gradients_reference(
    dy: Tensor, dsum: Tensor | None, s: Tensor, statistics: list[Tensor], bits: Tensor, weight: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight, dbias) in fp32 or fp64, in differentiable PyTorch ops."""
    rstd, *means = statistics
    normalised = (widen(s) - means[0] if means else widen(s)) * rstd
    dy = dy.to(normalised.dtype)
    scaled = dy if weight is None else dy * weight.to(dy.dtype)
    total = scaled - normalised * (normalised * scaled).mean(-1, keepdim=True)
    if means:
        total = total - scaled.mean(-1, keepdim=True)
    total = total * rstd
    if dsum is not None:
        total = total + dsum
    dx = torch.where(unpack(bits, s.shape[-1]).view(s.shape), total * keep_scale(p), 0) if p else total
    rows = list(range(dy.dim() - 1))
    dweight, dbias = ((one.sum(rows) if rows else one) for one in (dy * normalised, dy))
    return dx, total, dweight, dbias


def _empty_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)  # in half the time of x.new_empty


def empty_outputs(
    x: Tensor, residual: Tensor | None, p: float, centered: bool, dtype: torch.dtype, save: bool
) -> Outputs:
    """Without `save` only y has elements. The sum has none either where it is x itself."""
    rows = math.prod(x.shape[:-1])
    sum_type = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    summed = save and (residual is not None or p > 0)
    wide = torch.float64 if sum_type == torch.float64 else torch.float32
    return (
        _empty_rows(x, dtype),
        _empty_rows(x, sum_type) if summed else x.new_empty(0, dtype=sum_type),
        x.new_empty((1 + centered, rows) if save else (0, 0), dtype=wide),
        x.new_empty(bytes_for(rows, x.shape[-1]) if save and p else (0, 0), dtype=torch.uint8),
    )


def forward_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, p: float,
    centered: bool, dtype: torch.dtype, save: bool,
) -> Outputs:  # fmt: skip
    outputs = empty_outputs(x, residual, p, centered, dtype, save)
    s = x
    if p:
        keep = draw_keep(x, p)
        s = torch.where(keep, x * keep_scale(p), 0)
        if save:
            outputs[3].copy_(pack(keep.reshape(-1, x.shape[-1])))
    s = s if residual is None else s + residual
    normalised, statistics = standardised(s, eps, centered)
    outputs[0].copy_(_affine(normalised, weight, bias))
    if outputs[1].numel():
        outputs[1].copy_(s)
    if save:
        outputs[2].copy_(torch.stack([one.reshape(-1) for one in statistics]))
    return outputs


def empty_gradients(
    s: Tensor, weight: Tensor | None, p: float, biased: bool, x_type: torch.dtype, residual_type: torch.dtype | None,
    sums_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dresidual, sums). dresidual has no elements where there is no residual, or where it equals dx."""
    differs = residual_type is not None and (p > 0 or residual_type != x_type)
    return (
        _empty_rows(s, x_type),
        _empty_rows(s, residual_type or x_type) if differs else s.new_empty(0, dtype=x_type),
        s.new_empty((weight is not None) + biased, s.shape[-1], dtype=sums_type),
    )


def backward_reference(
    dy: Tensor, dsum: Tensor | None, s: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, p: float,
    biased: bool, x_type: torch.dtype, residual_type: torch.dtype | None, sums_type: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = empty_gradients(s, weight, p, biased, x_type, residual_type, sums_type)
    by_row = [one.view(*s.shape[:-1], 1) for one in statistics]
    dx, dresidual, dweight, dbias = gradients_reference(dy, dsum, s, by_row, bits, weight, p)
    gradients[0].copy_(dx)
    if gradients[1].numel():
        gradients[1].copy_(dresidual)
    for into, one in zip(gradients[2], [dweight] * (weight is not None) + [dbias] * biased, strict=True):
        into.copy_(one)
    return gradients
