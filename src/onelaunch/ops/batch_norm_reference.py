"""Batch norm, activation and dropout in PyTorch ops (the CPU path), and the memory layout of the op's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onelaunch.activations import activate, activation_gradient
from onelaunch.ops.dropout import bytes_for, draw_keep, pack, unpack
from onelaunch.ops.widen import widen
from onelaunch.rng import keep_scale

Outputs = tuple[Tensor, Tensor, Tensor]


def batch_norm_reference(
    x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, bias: Tensor | None, training: bool,
    eps: float, activation: str | None, keep: Tensor | None, p: float,
) -> Tensor:  # fmt: skip
    """The op's result for a given dropout mask; differentiable."""
    y = activate(F.batch_norm(x, mean, var, weight, bias, training, 0.0, eps), activation)
    return y if keep is None else torch.where(keep, y * keep_scale(p), 0)


def empty_like_output(x: Tensor) -> Tensor:
    """An empty tensor like y and dx: of x's shape, dtype and, if x is contiguous or channels last, strides; else contiguous."""
    if x.is_contiguous() or (x.dim() > 2 and channels_last(x) is not None):
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def channels_last(x: Tensor) -> Tensor | None:
    """x as a contiguous `[..., channels]` view if its memory has that order, else None."""
    view = x.movedim(1, -1)
    return view if view.is_contiguous() else None


def lines_and_inner(x: Tensor) -> tuple[int, int]:
    """(lines, elements per line) of x's memory: (rows, channels), or (samples * channels, length); one line for one channel."""
    channels = x.shape[1]
    if channels == 1:
        return 1, x.numel()
    if x.dim() == 2 or channels_last(x) is not None:
        return x.numel() // max(1, channels), channels
    lines = x.shape[0] * channels
    return lines, x.numel() // max(1, lines)


def empty_outputs(x: Tensor, training: bool, p: float) -> Outputs:
    """Empty (y, statistics: mean, 1 / standard deviation and in training unbiased variance, keep bits)."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = empty_like_output(x)
    bits = x.new_empty(bytes_for(*lines_and_inner(y)) if p else (0, 0), dtype=torch.uint8)
    return y, x.new_empty((3 if training else 2, x.shape[1]), dtype=wide), bits


def _axes_except_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _per_channel(statistic: Tensor, x: Tensor) -> Tensor:
    return statistic.view(1, -1, *[1] * (x.dim() - 2))


def _in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of `tensor` as `[lines, inner]` in the order of `like`'s memory."""
    last = like.dim() > 2 and channels_last(like) is not None
    return (tensor.movedim(1, -1) if last else tensor).reshape(lines_and_inner(like))


def _kept(bits: Tensor, like: Tensor) -> Tensor:
    """The keep mask in the shape of `like`; its bits are packed in the order of `like`'s memory."""
    flat = unpack(bits, lines_and_inner(like)[1])
    if like.dim() > 2 and channels_last(like) is not None:
        return flat.view(like.movedim(1, -1).shape).movedim(-1, 1)
    return flat.view(like.shape)


def forward_reference(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None, bias: Tensor | None,
    training: bool, eps: float, activation: str | None, p: float,
) -> Outputs:  # fmt: skip
    y, statistics, bits = empty_outputs(x, training, p)
    mean, rstd = statistics[:2]
    if training:
        average, inverse, variance = statistics_of(x, eps)
        statistics[2].copy_(variance)
    else:
        assert running_mean is not None
        assert running_var is not None
        average, inverse = running_mean, (running_var.to(mean.dtype) + eps).rsqrt()
    mean.copy_(average)
    rstd.copy_(inverse)
    z = _affine(x, mean, rstd, weight, bias)
    value = activate(z, activation)
    if p:
        keep = draw_keep(z, p)
        value = torch.where(keep, value * keep_scale(p), 0)
        if activation == "relu":
            keep = keep & ~(z <= 0)
        bits.copy_(pack(_in_memory_order(keep, y)))
    y.copy_(value)
    return y, statistics, bits


def _affine(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(rstd, x)
    if weight is not None:
        z = z * _per_channel(weight, x)
    return z if bias is None else z + _per_channel(bias, x)


def backward_reference(
    dy: Tensor, x: Tensor, statistics: Tensor, bits: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, activation: str | None, p: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    mean, rstd = statistics[:2]
    dx, dbias, dweight = differentiable_backward_reference(
        dy, x, mean, rstd, bits, weight, bias, training, activation, p
    )
    return empty_like_output(x).copy_(dx), torch.stack((dbias, dweight)).to(statistics.dtype)


def differentiable_backward_reference(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, bits: Tensor, weight: Tensor | None, bias: Tensor | None,
    training: bool, activation: str | None, p: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dbias, dweight) in differentiable ops, for second derivatives; mean and rstd must be functions of x for these."""
    dz = dy.to(mean.dtype)
    if p:
        dz = torch.where(_kept(bits, empty_like_output(x)), dz * keep_scale(p), 0)
    if activation is not None and not (p and activation == "relu"):
        dz = dz * activation_gradient(_affine(x, mean, rstd, weight, bias), activation)
    x_hat = _affine(x, mean, rstd, None, None)
    dbias, dweight = dz.sum(_axes_except_channels(x)), (dz * x_hat).sum(_axes_except_channels(x))
    dx = dz
    if training:
        count = x.numel() // max(1, x.shape[1])
        dx = dz - _per_channel(dbias / count, x) - x_hat * _per_channel(dweight / count, x)
    dx = dx * _per_channel(rstd, x)
    return dx if weight is None else dx * _per_channel(weight, x), dbias, dweight


def statistics_of(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, 1 / standard deviation, unbiased variance) per channel, as differentiable functions of x."""
    x = widen(x)
    if not x.numel():
        return (torch.full(x.shape[1:2], float("nan"), dtype=x.dtype, device=x.device),) * 3
    var, mean = torch.var_mean(x, _axes_except_channels(x), correction=0)
    count = x.numel() // x.shape[1]
    return mean, (var + eps).rsqrt(), var * (count / max(1, count - 1))


def move_running(
    running: tuple[Tensor | None, Tensor | None], statistics: Tensor | Sequence[Tensor], momentum: float
) -> None:
    """Update (mean, variance) from a batch's statistics: mean, 1 / standard deviation, unbiased variance."""
    for average, batch in zip(running, statistics[::2], strict=True):
        if average is not None:
            average.lerp_(batch.to(average.dtype), momentum)
