"""The backward of batch norm, activation and dropout: 5 passes over memory (read dy, x; read dy, x, write dx).

The first pass sums, per channel, the gradient before the activation and that gradient times x_hat; they are also the
gradients of bias and weight. The second writes dx. With constant statistics (evaluation) one pass does both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.kernels.batch_norm import (
    APPLY_PROGRAMS,
    MERGE_CHANNELS,
    MERGE_PARTS,
    REDUCE_PROGRAMS,
    Layout,
    channel_index,
    load_channel,
    sum_per_channel,
    tile_addresses,
    tiling,
)
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import activation_gradient, unpack_bits
from onelaunch.rng import keep_scale


@triton.jit
def upstream_gradient(dy, x_hat, weight, bias, keep_ptr, number, within, scale, ACTIVATION: tl.constexpr):
    """The gradient before the activation."""
    if keep_ptr is not None:
        bits = tl.load(keep_ptr + number, mask=within, other=0)
        dy = tl.where(unpack_bits(bits), dy * scale, 0.0)
        if ACTIVATION is not None and ACTIVATION != "relu":
            dy *= activation_gradient(x_hat * weight + bias, ACTIVATION)
    elif ACTIVATION is not None:
        dy *= activation_gradient(x_hat * weight + bias, ACTIVATION)
    return dy


@triton.jit
def gradient_sums_kernel(
    dy_ptr,
    x_ptr,
    keep_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    parts_ptr,
    dx_ptr,
    scale,
    rows,
    channels,
    length,
    segments,
    steps,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Per channel: the sum of the gradient and of gradient times x_hat. With constant statistics dx is known at once."""
    channel = channel_index(GROUPS, CHANNELS_LAST)
    mean = load_channel(mean_ptr, channel, channels, 0.0)
    rstd = load_channel(rstd_ptr, channel, channels, 1.0)
    weight = load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    plain = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    weighted = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS)
        element, inside, number, within = tile_addresses(row, rows, channels, length, segments, GROUPS, CHANNELS_LAST)
        dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32)
        x_hat = (tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        dz = upstream_gradient(dy, x_hat, weight, bias, keep_ptr, number, within, scale, ACTIVATION)
        plain += dz
        weighted += dz * x_hat
        if dx_ptr is not None:
            tl.store(dx_ptr + element, (dz * weight * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    target = parts_ptr + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    tl.store(target, sum_per_channel(plain, CHANNELS_LAST), mask=channel < channels)
    tl.store(target + channels, sum_per_channel(weighted, CHANNELS_LAST), mask=channel < channels)


@triton.jit
def merge_sums_kernel(
    parts_ptr, sums_ptr, dweight_ptr, dbias_ptr, parts, channels, PARTS: tl.constexpr, CHANNELS: tl.constexpr
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    present = channel < channels
    plain = tl.zeros((PARTS, CHANNELS), tl.float32)
    weighted = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & present[None, :]
        source = parts_ptr + part[:, None].to(tl.int64) * 2 * channels + channel[None, :]
        plain += tl.load(source, mask=inside, other=0.0)
        weighted += tl.load(source + channels, mask=inside, other=0.0)
    bias_sum = tl.sum(plain, axis=0)
    weight_sum = tl.sum(weighted, axis=0)
    tl.store(sums_ptr + channel, bias_sum, mask=present)
    tl.store(sums_ptr + channels + channel, weight_sum, mask=present)
    if dweight_ptr is not None:
        tl.store(dweight_ptr + channel, weight_sum.to(dweight_ptr.dtype.element_ty), mask=present)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + channel, bias_sum.to(dbias_ptr.dtype.element_ty), mask=present)


@triton.jit
def input_gradient_kernel(
    dy_ptr,
    x_ptr,
    keep_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    sums_ptr,
    dx_ptr,
    scale,
    inverse_count,
    rows,
    channels,
    length,
    segments,
    steps,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    channel = channel_index(GROUPS, CHANNELS_LAST)
    mean = load_channel(mean_ptr, channel, channels, 0.0)
    rstd = load_channel(rstd_ptr, channel, channels, 1.0)
    weight = load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    plain = load_channel(sums_ptr, channel, channels, 0.0) * inverse_count
    weighted = load_channel(sums_ptr + channels, channel, channels, 0.0) * inverse_count
    last = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * steps * ROWS
    for step in range(steps):
        row = last + (steps - 1 - step) * ROWS + tl.arange(0, ROWS)
        element, inside, number, within = tile_addresses(row, rows, channels, length, segments, GROUPS, CHANNELS_LAST)
        dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32)
        x_hat = (tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        dz = upstream_gradient(dy, x_hat, weight, bias, keep_ptr, number, within, scale, ACTIVATION)
        dx = (dz - plain - x_hat * weighted) * weight * rstd
        tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def batch_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    layout: Layout,
    keep: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dx: torch.Tensor,
    dweight: torch.Tensor | None,
    dbias: torch.Tensor | None,
    *,
    training: bool,
    activation: str | None,
    p: float,
) -> None:
    """Fills dx, dweight and dbias; dy, x and dx lie alike in memory."""
    tiles = tiling(layout, REDUCE_PROGRAMS)
    scale = keep_scale(p)
    parts = x.new_empty((tiles.parts, 2, layout.channels), dtype=torch.float32)
    sums = x.new_empty((2, layout.channels), dtype=torch.float32)
    constants = (tiles.rows, tiles.groups, layout.length == 0, activation)
    saved = (dy, x, keep, mean, rstd, weight, bias)
    launch(
        gradient_sums_kernel,
        tiles.grid,
        (*saved, parts, None if training else dx),
        (scale,),
        tiles.sizes,
        constants,
    )
    launch(
        merge_sums_kernel,
        (triton.cdiv(layout.channels, MERGE_CHANNELS),),
        (parts, sums, dweight, dbias),
        (),
        (tiles.parts, layout.channels),
        (MERGE_PARTS, MERGE_CHANNELS),
    )
    if training:
        tiles = tiling(layout, APPLY_PROGRAMS)
        constants = (tiles.rows, tiles.groups, layout.length == 0, activation)
        launch(
            input_gradient_kernel,
            tiles.grid,
            (*saved, sums, dx),
            (scale, 1 / layout.count),
            tiles.sizes,
            constants,
        )
