"""The backward pass of batch norm, activation and dropout: 5 passes over memory (read dy, x; read dy, x, write dx).

The first kernel sums, per channel, the gradient before the activation and that gradient times x_hat. These sums are also the
gradients of bias and weight. The second kernel writes dx. With constant statistics (evaluation) one kernel does both.
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
    mask_repeated_channels,
    repeat_over_depth,
    sum_of_thread,
    sum_per_channel,
    tile_addresses,
    tiling,
)
from onelaunch.kernels.dependent_launch import allow_next_kernel, overlaps, wait_for_previous_kernel
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import activation_gradient, unpack_bits
from onelaunch.rng import keep_scale

# By element size. 65536 x 1024 on an H200, fp32 / bf16: sums 131 / 74 us, dx 195 / 100 us (a copy: 128 / 66 us).
SUMS_TILE = {4: TileShape(2, 128, 132 * 4), 2: TileShape(1, 128, 132 * 8)}
GRADIENT_TILE = {4: TileShape(1, 128, 132 * 256), 2: TileShape(4, 128, 132 * 32)}


@triton.jit
def upstream_gradient(dy, x_hat, weight, bias, keep_ptr, number, within, ACTIVATION: tl.constexpr):
    """The gradient with respect to the activation's input. With dropout, the caller still has to scale it."""
    if keep_ptr is not None:
        bits = tl.load(keep_ptr + number, mask=within, other=0)
        dy = tl.where(unpack_bits(bits), dy, 0.0)
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
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WHOLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Per channel, the sums of the gradient and of gradient times x_hat; with constant statistics also dx.

    A program that has its channels to itself (no `parts`) writes the final sums.
    """
    channel = channel_index(ROWS, GROUPS, CHANNELS_LAST)
    mean = load_channel(statistics_ptr, channel, channels, 0.0)
    rstd = load_channel(statistics_ptr + channels, channel, channels, 1.0)
    weight = load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    slope = weight * rstd * scale
    mean, deep_rstd, slope = (
        repeat_over_depth(mean, DEPTH),
        repeat_over_depth(rstd, DEPTH),
        repeat_over_depth(slope, DEPTH),
    )
    weight, bias = repeat_over_depth(weight, DEPTH), repeat_over_depth(bias, DEPTH)
    plain = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    weighted = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    for step in range(steps):
        tile = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        base, element, inside, number, within = tile_addresses(
            tile, rows, channels, length, segments, DEPTH, ROWS, GROUPS, CHANNELS_LAST, WHOLE
        )
        dy = tl.load(dy_ptr + base + element, mask=inside, other=0.0).to(tl.float32)
        centred = tl.load(x_ptr + base + element, mask=inside, other=0.0).to(tl.float32) - mean
        dz = upstream_gradient(dy, centred * deep_rstd, weight, bias, keep_ptr, number, within, ACTIVATION)
        plain += sum_of_thread(dz, DEPTH)
        weighted += sum_of_thread(dz * centred, DEPTH)
        if dx_ptr is not None:
            tl.store(dx_ptr + base + element, (dz * slope).to(dx_ptr.dtype.element_ty), mask=inside)
    allow_next_kernel(OVERLAP)
    plain *= scale
    weighted *= scale * rstd
    channel = mask_repeated_channels(channel, channels, GROUPS)
    if parts_ptr is not None:
        target = parts_ptr + tl.program_id(0).to(tl.int64) * 2 * channels + channel
    else:
        target = sums_ptr + channel
    tl.store(target, sum_per_channel(plain, GROUPS, CHANNELS_LAST), mask=channel < channels)
    tl.store(target + channels, sum_per_channel(weighted, GROUPS, CHANNELS_LAST), mask=channel < channels)


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
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WHOLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    channel = channel_index(ROWS, GROUPS, CHANNELS_LAST)
    mean = load_channel(statistics_ptr, channel, channels, 0.0)
    rstd = load_channel(statistics_ptr + channels, channel, channels, 1.0)
    weight = load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    plain = load_channel(sums_ptr, channel, channels, 0.0) * inverse_count
    weighted = load_channel(sums_ptr + channels, channel, channels, 0.0) * inverse_count
    # dx = (dz - plain - x_hat * weighted) * weight * rstd: two instructions per element where the mean may be folded in, as
    # in the forward pass.
    FOLD: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    steepness = weight * rstd
    tilt = -steepness * weighted * rstd
    level = -steepness * plain
    if FOLD:
        level -= tilt * mean
    steepness = repeat_over_depth(steepness * scale, DEPTH)
    tilt, level, mean = repeat_over_depth(tilt, DEPTH), repeat_over_depth(level, DEPTH), repeat_over_depth(mean, DEPTH)
    rstd, weight, bias = (
        repeat_over_depth(rstd, DEPTH),
        repeat_over_depth(weight, DEPTH),
        repeat_over_depth(bias, DEPTH),
    )
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    for step in range(steps):
        tile = program * steps + steps - 1 - step
        base, element, inside, number, within = tile_addresses(
            tile, rows, channels, length, segments, DEPTH, ROWS, GROUPS, CHANNELS_LAST, WHOLE
        )
        dy = tl.load(dy_ptr + base + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        x = tl.load(x_ptr + base + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        dz = upstream_gradient(dy, (x - mean) * rstd, weight, bias, keep_ptr, number, within, ACTIVATION)
        if not FOLD:
            x -= mean
        dx = dz * steepness + (x * tilt + level)
        tl.store(dx_ptr + base + element, dx.to(dx_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


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
    """Fill dx, and sums (`[2, channels]` fp32: gradients of bias and weight); dy, x and dx have the same strides."""
    shape = SUMS_TILE[x.element_size()]
    tiles = tiling(layout, shape)
    overlap = overlaps(x)
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
        (*tiles.constants, activation, overlap),
        num_warps=shape.warps,
    )
    if parts is not None:
        column_sums(parts.view(tiles.parts, -1), sums.view(-1))
    if training:
        shape = GRADIENT_TILE[x.element_size()]
        tiles = tiling(layout, shape)
        launch(
            input_gradient_kernel,
            (tiles.parts, tiles.columns),
            (*saved, sums, dx),
            (scale, 1 / layout.per_channel),
            tiles.sizes,
            (*tiles.constants, activation, overlap),
            num_warps=shape.warps,
            launch_pdl=overlap,
        )
