"""Batch norm, activation and dropout: 3 passes over memory forward, 5 backward, which is the least without the data on chip.

Forward: Welford statistics of x (read), combined per channel in a tiny step; then normalise, activate, drop (read, write).
Backward: the two sums per channel (read dy, x), combined; then dx (read dy, x, write). Dropout saves one bit an element, with
the sign of relu in it; any other slope is computed again from x. The second pass of each walks the rows backwards: what the
first pass read last is still in L2.

Two layouts share the kernels. Channels last (`[m, c]`, also N(D)HWC memory): a tile row is a row, channels lie along it.
Channels first (`[n, c, length]`): a tile row is a segment of one channel of one sample, `program_id(1)` is the channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import activate, load_key, pack_bits, random_16_bits
from onelaunch.rng import keep_scale, keep_threshold

GROUPS_PER_TILE = 256  # of 8 elements: 2048 elements for 128 threads
MOST_GROUPS = 32  # 256 elements along memory a tile row; the rest of the tile goes down the rows
REDUCE_PROGRAMS = 132 * 8
APPLY_PROGRAMS = 132 * 64
MERGE_PARTS, MERGE_CHANNELS = 64, 16


@triton.jit
def tile_addresses(row, rows, channels, length, segments, GROUPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """For tile rows `row`: element offsets and mask `[rows, groups, 8]`, group numbers and mask `[rows, groups]`."""
    group = tl.arange(0, GROUPS)[None, :]
    row = row[:, None]
    if CHANNELS_LAST:
        line = row
        inner = channels
        group = tl.program_id(1) * GROUPS + group
    else:
        line = (row // segments) * channels + tl.program_id(1)
        inner = length
        group = (row % segments) * GROUPS + group
    groups_per_line = tl.cdiv(inner, 8)
    lane = tl.arange(0, 8)[None, None, :]
    column = tl.expand_dims(group, 2) * 8 + lane
    inside = tl.expand_dims(row < rows, 2) & (column < inner)
    element = tl.expand_dims(line, 2) * inner + column
    return element, inside, line * groups_per_line + group, (row < rows) & (group < groups_per_line)


@triton.jit
def channel_index(GROUPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """The channels of this program, in a shape that broadcasts over its tiles."""
    if CHANNELS_LAST:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        return group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    else:
        return tl.program_id(1) + tl.zeros((1, 1, 1), tl.int32)


@triton.jit
def sum_per_channel(tile, CHANNELS_LAST: tl.constexpr):
    """`[rows, groups, 8]` -> `[1, groups, 8]` or `[1, 1, 1]`, the shape of `channel_index`."""
    total = tl.sum(tile, axis=0, keep_dims=True)
    if not CHANNELS_LAST:
        total = tl.sum(tl.sum(total, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return total


@triton.jit
def load_channel(pointer, channel, channels, default):
    if pointer is not None:
        return tl.load(pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
    else:
        return tl.zeros(channel.shape, tl.float32) + default


@triton.jit
def statistics_kernel(
    x_ptr,
    parts_ptr,
    rows,
    channels,
    length,
    segments,
    steps,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
):
    """Welford down the tiles, one running mean for every place of the tile; the places are merged once, at the end."""
    mean = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    spread = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    if CHANNELS_LAST:
        count = tl.zeros((ROWS, 1, 1), tl.float32)
    else:
        count = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS)
        element, inside, _, _ = tile_addresses(row, rows, channels, length, segments, GROUPS, CHANNELS_LAST)
        x = tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32)
        if CHANNELS_LAST:
            present = (row < rows)[:, None, None]
        else:
            present = inside
        count += present.to(tl.float32)
        delta = x - mean
        mean += tl.where(present, delta / tl.maximum(count, 1.0), 0.0)
        spread += tl.where(present, delta * (x - mean), 0.0)

    total = sum_per_channel(count, CHANNELS_LAST)
    merged = sum_per_channel(count * mean, CHANNELS_LAST) / tl.maximum(total, 1.0)
    apart = mean - merged
    spread = sum_per_channel(spread + count * apart * apart, CHANNELS_LAST)

    channel = channel_index(GROUPS, CHANNELS_LAST)
    target = parts_ptr + tl.program_id(0).to(tl.int64) * 3 * channels + channel
    tl.store(target, total + tl.zeros_like(merged), mask=channel < channels)
    tl.store(target + channels, merged, mask=channel < channels)
    tl.store(target + 2 * channels, spread, mask=channel < channels)


@triton.jit
def merge_statistics_kernel(
    parts_ptr,
    mean_ptr,
    rstd_ptr,
    running_mean_ptr,
    running_var_ptr,
    momentum,
    eps,
    parts,
    channels,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Chan's merge of the programs' statistics in a fixed order, and the running statistics as torch keeps them."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    present = channel < channels
    count = tl.zeros((PARTS, CHANNELS), tl.float32)
    mean = tl.zeros((PARTS, CHANNELS), tl.float32)
    spread = tl.zeros((PARTS, CHANNELS), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & present[None, :]
        source = parts_ptr + part[:, None].to(tl.int64) * 3 * channels + channel[None, :]
        new = tl.load(source, mask=inside, other=0.0)
        delta = tl.load(source + channels, mask=inside, other=0.0) - mean
        both = tl.maximum(count + new, 1.0)
        mean += delta * new / both
        spread += tl.load(source + 2 * channels, mask=inside, other=0.0) + delta * delta * count * new / both
        count += new
    total = tl.maximum(tl.sum(count, axis=0), 1.0)
    merged = tl.sum(count * mean, axis=0) / total
    apart = mean - merged[None, :]
    variance_sum = tl.sum(spread + count * apart * apart, axis=0)
    tl.store(mean_ptr + channel, merged, mask=present)
    tl.store(rstd_ptr + channel, 1 / tl.sqrt_rn(variance_sum / total + eps), mask=present)
    if running_mean_ptr is not None:
        old = tl.load(running_mean_ptr + channel, mask=present).to(tl.float32)
        new_mean = old + momentum * (merged - old)
        tl.store(running_mean_ptr + channel, new_mean.to(running_mean_ptr.dtype.element_ty), mask=present)
    if running_var_ptr is not None:
        old = tl.load(running_var_ptr + channel, mask=present).to(tl.float32)
        new_var = old + momentum * (variance_sum / tl.maximum(total - 1, 1.0) - old)
        tl.store(running_var_ptr + channel, new_var.to(running_var_ptr.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def normalise_kernel(
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    keep_ptr,
    key_ptr,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
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
    channel = channel_index(GROUPS, CHANNELS_LAST)
    mean = load_channel(mean_ptr, channel, channels, 0.0)
    slope = load_channel(weight_ptr, channel, channels, 1.0) * load_channel(rstd_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    # Backwards through the rows, after the statistics went forwards: the last rows are still in L2.
    last = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * steps * ROWS
    for step in range(steps):
        row = last + (steps - 1 - step) * ROWS + tl.arange(0, ROWS)
        element, inside, number, within = tile_addresses(row, rows, channels, length, segments, GROUPS, CHANNELS_LAST)
        x = tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32)
        z = (x - mean) * slope + bias
        y = activate(z, ACTIVATION)
        if keep_ptr is not None:
            key_seed, key_offset = load_key(key_ptr, seed, offset)
            keep = random_16_bits(key_seed, key_offset, number).to(tl.int32) < threshold
            if ACTIVATION == "relu":
                keep = keep & ((z <= 0) == 0)
            y = tl.where(keep, y * scale, 0.0)
            tl.store(keep_ptr + number, pack_bits(keep), mask=within)
        tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)


class Layout(NamedTuple):
    """How the elements lie in memory: `[rows, channels]` when `length` is 0, else `[samples, channels, length]`."""

    samples: int
    channels: int
    length: int

    @property
    def lines(self) -> int:
        return self.samples if self.length == 0 else self.samples * self.channels

    @property
    def inner(self) -> int:
        return self.channels if self.length == 0 else self.length

    @property
    def count(self) -> int:
        """Elements a channel's statistics are over."""
        return self.samples * max(1, self.length)


class Tiling(NamedTuple):
    """A grid of programs, each walking `steps` tiles of `rows` by `groups * 8` elements."""

    parts: int
    columns: int
    sizes: tuple[int, int, int, int, int]  # rows, channels, length, segments, steps, as the kernels take them
    rows: int
    groups: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.parts, self.columns


def tiling(layout: Layout, programs: int) -> Tiling:
    groups = min(MOST_GROUPS, triton.next_power_of_2(triton.cdiv(layout.inner, 8)))
    rows = GROUPS_PER_TILE // groups
    blocks = triton.cdiv(layout.inner, groups * 8)
    if layout.length == 0:
        tile_rows, columns, segments = layout.samples, blocks, 1
    else:
        tile_rows, columns, segments = layout.samples * blocks, layout.channels, blocks
    tiles = triton.cdiv(tile_rows, rows)
    # A power of two: the step count is an argument, and few values of it mean few compiled kernels.
    steps = triton.next_power_of_2(triton.cdiv(tiles * columns, programs))
    sizes = (tile_rows, layout.channels, layout.length, segments, steps)
    return Tiling(triton.cdiv(tiles, steps), columns, sizes, rows, groups)


def batch_statistics(
    x: torch.Tensor,
    layout: Layout,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> None:
    """Fills mean and rstd (fp32, one a channel) and moves the running statistics."""
    tiles = tiling(layout, REDUCE_PROGRAMS)
    parts = x.new_empty((tiles.parts, 3, layout.channels), dtype=torch.float32)
    constants = (tiles.rows, tiles.groups, layout.length == 0)
    launch(statistics_kernel, tiles.grid, (x, parts), (), tiles.sizes, constants)
    launch(
        merge_statistics_kernel,
        (triton.cdiv(layout.channels, MERGE_CHANNELS),),
        (parts, mean, rstd, running_mean, running_var),
        (momentum, eps),
        (tiles.parts, layout.channels),
        (MERGE_PARTS, MERGE_CHANNELS),
    )


def normalise(
    x: torch.Tensor,
    layout: Layout,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    keep: torch.Tensor | None,
    *,
    activation: str | None,
    p: float,
    key: DropoutKey,
) -> None:
    """Fills y, and keep (`[lines, ceil(inner / 8)]` bytes) where dropout is wanted."""
    tiles = tiling(layout, APPLY_PROGRAMS)
    launch(
        normalise_kernel,
        tiles.grid,
        (x, mean, rstd, weight, bias, y, keep, key.memory),
        (key.seed, key.offset, keep_threshold(p), keep_scale(p)),
        tiles.sizes,
        (tiles.rows, tiles.groups, layout.length == 0, activation),
    )
