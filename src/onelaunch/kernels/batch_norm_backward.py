"""The backward of batch norm, activation and dropout: 5 passes over memory (read dy, x; read dy, x, write dx).

The first pass sums, per channel, the gradient before the activation and that gradient times x_hat; they are also the
gradients of bias and weight. The second writes dx. With constant statistics (evaluation) one pass does both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.kernels.activation_dropout import column_sums
from onelaunch.kernels.batch_norm_tiles import (
    Layout,
    TileShape,
    channel_index,
    load_channel,
    sum_per_channel,
    tile_addresses,
    tiling,
)
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import activation_gradient, unpack_bits
from onelaunch.rng import keep_scale

# Measured on an H200, 65536 x 1024, fp32 / bf16, in us: 130 / 75, 196 / 103 (copy: 128 / 66).
SUMS_TILE = TileShape(256, 64, 132 * 8, 2)
GRADIENT_TILE = TileShape(128, 128, 132 * 64, 4)


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
    statistics_ptr,
    weight_ptr,
    bias_ptr,
    parts_ptr,
    sums_ptr,
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
    UNROLL: tl.constexpr,
):
    """Per channel: the sum of the gradient and of gradient times x_hat. With constant statistics dx is known at once.

    A program alone on its channels (no `parts`) writes the sums themselves.
    """
    channel = channel_index(GROUPS, CHANNELS_LAST)
    mean = load_channel(statistics_ptr, channel, channels, 0.0)
    rstd = load_channel(statistics_ptr + channels, channel, channels, 1.0)
    weight = load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    plain = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    weighted = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        row = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        element, inside, number, within = tile_addresses(row, rows, channels, length, segments, GROUPS, CHANNELS_LAST)
        dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32)
        x_hat = (tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
        dz = upstream_gradient(dy, x_hat, weight, bias, keep_ptr, number, within, scale, ACTIVATION)
        plain += dz
        weighted += dz * x_hat
        if dx_ptr is not None:
            tl.store(dx_ptr + element, (dz * weight * rstd).to(dx_ptr.dtype.element_ty), mask=inside)
    if parts_ptr is not None:
        target = parts_ptr + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    else:
        target = sums_ptr + channel
    tl.store(target, sum_per_channel(plain, CHANNELS_LAST), mask=channel < channels)
    tl.store(target + channels, sum_per_channel(weighted, CHANNELS_LAST), mask=channel < channels)


@triton.jit
def input_gradient_kernel(
    dy_ptr,
    x_ptr,
    keep_ptr,
    statistics_ptr,
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
    UNROLL: tl.constexpr,
):
    channel = channel_index(GROUPS, CHANNELS_LAST)
    mean = load_channel(statistics_ptr, channel, channels, 0.0)
    rstd = load_channel(statistics_ptr + channels, channel, channels, 1.0)
    weight = load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    plain = load_channel(sums_ptr, channel, channels, 0.0) * inverse_count
    weighted = load_channel(sums_ptr + channels, channel, channels, 0.0) * inverse_count
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    for step in tl.range(0, steps, loop_unroll_factor=UNROLL):
        row = (program * steps + steps - 1 - step) * ROWS + tl.arange(0, ROWS)
        element, inside, number, within = tile_addresses(row, rows, channels, length, segments, GROUPS, CHANNELS_LAST)
        dy = tl.load(dy_ptr + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_ptr + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x_hat = (x - mean) * rstd
        dz = upstream_gradient(dy, x_hat, weight, bias, keep_ptr, number, within, scale, ACTIVATION)
        dx = (dz - plain - x_hat * weighted) * weight * rstd
        tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


def batch_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    layout: Layout,
    keep: torch.Tensor | None,
    statistics: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dx: torch.Tensor,
    sums: torch.Tensor,
    *,
    training: bool,
    activation: str | None,
    p: float,
) -> None:
    """Fills dx, and sums (`[2, channels]` fp32: gradient of bias, of weight); dy, x and dx lie alike in memory."""
    tiles = tiling(layout, SUMS_TILE)
    scale = keep_scale(p)
    parts = None
    if tiles.parts > 1:
        parts = torch.empty((tiles.parts, 2, layout.channels), dtype=torch.float32, device=x.device)
    saved = (dy, x, keep, statistics, weight, bias)
    launch(
        gradient_sums_kernel,
        (tiles.parts, tiles.columns),
        (*saved, parts, sums, None if training else dx),
        (scale,),
        tiles.sizes,
        (*tiles.constants, activation, SUMS_TILE.unroll),
    )
    if parts is not None:
        column_sums(parts.view(tiles.parts, -1), sums.view(-1))
    if training:
        tiles = tiling(layout, GRADIENT_TILE)
        launch(
            input_gradient_kernel,
            (tiles.parts, tiles.columns),
            (*saved, sums, dx),
            (scale, 1 / layout.per_channel),
            tiles.sizes,
            (*tiles.constants, activation, GRADIENT_TILE.unroll),
            num_warps=GRADIENT_TILE.warps,
        )
