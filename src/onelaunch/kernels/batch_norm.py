"""Batch norm, activation and dropout: 3 passes over memory forward, 5 backward, the minimum where x does not fit on the chip.

Forward: statistics of x (read), combined per channel by a tiny kernel; then normalise, activate and drop (read, write).
Backward: two sums per channel (read dy, x), combined; then dx (read dy, x, write). Dropout saves one bit per element, which
also holds the sign for relu; any other derivative is recomputed from x. The backward kernels are in batch_norm_backward.py,
the addresses of the tiles in batch_norm_tiles.py.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
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
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import activate, kept, load_key, pack_bits, relu_and_drop
from onelaunch.rng import keep_scale, keep_threshold

# By element size. 65536 x 1024 on an H200, fp32 / bf16: statistics 72 / 41 us, normalise 137 / 73 us (a copy: 128 / 66 us).
STATISTICS_TILE = {4: TileShape(4, 128, 132 * 4), 2: TileShape(8, 128, 132 * 4)}
NORMALISE_TILE = {4: TileShape(1, 128, 132 * 256), 2: TileShape(1, 128, 132 * 32)}
MERGE_PARTS, MERGE_CHANNELS, MERGE_WARPS = 512, 8, 8  # one iteration for the largest number of parts


@triton.jit
def finish_statistics(
    total, mean, spread, channel, channels, statistics_ptr, running_mean_ptr, running_var_ptr, momentum, eps
):
    """Store mean, 1 / standard deviation and unbiased variance, and update the running statistics as PyTorch does."""
    present = channel < channels
    variance = spread / tl.maximum(total - 1, 1.0)
    tl.store(statistics_ptr + channel, mean, mask=present)
    tl.store(statistics_ptr + channels + channel, 1 / tl.sqrt_rn(spread / total + eps), mask=present)
    tl.store(statistics_ptr + 2 * channels + channel, variance, mask=present)
    if running_mean_ptr is not None:
        old = tl.load(running_mean_ptr + channel, mask=present, other=0.0).to(tl.float32)
        new = old + momentum * (mean - old)
        tl.store(running_mean_ptr + channel, new.to(running_mean_ptr.dtype.element_ty), mask=present)
    if running_var_ptr is not None:
        old = tl.load(running_var_ptr + channel, mask=present, other=0.0).to(tl.float32)
        new = old + momentum * (variance - old)
        tl.store(running_var_ptr + channel, new.to(running_var_ptr.dtype.element_ty), mask=present)


@triton.jit
def statistics_kernel(
    x_ptr,
    parts_ptr,
    statistics_ptr,
    running_mean_ptr,
    running_var_ptr,
    momentum,
    eps,
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
    OVERLAP: tl.constexpr,
):
    """Per channel, the count, mean and sum of squared deviations of this program's rows.

    The sums are taken around the mean of the program's first tile. With n rows, r of them in the first tile, the squared
    distance of that mean from the true one is at most n / r variances. The cancellation thus costs n / r roundings: a hundred,
    not 1e7. A program that has its channels to itself (no `parts`) finishes the statistics.
    """
    first = tl.program_id(0).to(tl.int64) * steps
    base, element, inside, _, _ = tile_addresses(
        first, rows, channels, length, segments, DEPTH, ROWS, GROUPS, CHANNELS_LAST, WHOLE
    )
    x = tl.load(x_ptr + base + element, mask=inside, other=0.0).to(tl.float32)
    present = sum_of_thread(inside.to(tl.float32), DEPTH)
    centre = sum_per_channel(sum_of_thread(x, DEPTH), GROUPS, CHANNELS_LAST)
    centre /= tl.maximum(sum_per_channel(present, GROUPS, CHANNELS_LAST), 1.0)

    plain = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    squared = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    count = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    # A program's rows are contiguous. Interleaved programs took 49 us instead of 38 (65536 x 1024 bf16 on an H200), and the
    # next kernel found no more of x in L2.
    for step in range(steps):
        base, element, inside, _, _ = tile_addresses(
            first + step, rows, channels, length, segments, DEPTH, ROWS, GROUPS, CHANNELS_LAST, WHOLE
        )
        x = tl.load(x_ptr + base + element, mask=inside, other=0.0).to(tl.float32)
        distance = tl.where(inside, x - repeat_over_depth(centre, DEPTH), 0.0)
        plain += sum_of_thread(distance, DEPTH)
        squared += sum_of_thread(distance * distance, DEPTH)
        if not CHANNELS_LAST:
            count += sum_of_thread(inside.to(tl.float32), DEPTH)

    allow_next_kernel(OVERLAP)
    if CHANNELS_LAST:
        own_rows = steps * (DEPTH * ROWS)
        total = tl.minimum(rows - tl.program_id(0).to(tl.int64) * own_rows, own_rows).to(tl.float32) + tl.zeros_like(
            centre
        )
    else:
        total = sum_per_channel(count, GROUPS, CHANNELS_LAST)
    shift = sum_per_channel(plain, GROUPS, CHANNELS_LAST) / tl.maximum(total, 1.0)
    spread = tl.maximum(sum_per_channel(squared, GROUPS, CHANNELS_LAST) - total * shift * shift, 0.0)

    channel = mask_repeated_channels(channel_index(ROWS, GROUPS, CHANNELS_LAST), channels, GROUPS)
    if parts_ptr is not None:
        target = parts_ptr + tl.program_id(0).to(tl.int64) * 3 * channels + channel
        tl.store(target, total, mask=channel < channels)
        tl.store(target + channels, centre + shift, mask=channel < channels)
        tl.store(target + 2 * channels, spread, mask=channel < channels)
    else:
        finish_statistics(
            tl.maximum(total, 1.0), centre + shift, spread, channel, channels, statistics_ptr, running_mean_ptr,
            running_var_ptr, momentum, eps,
        )  # fmt: skip


@triton.jit
def merge_statistics_kernel(
    parts_ptr,
    statistics_ptr,
    running_mean_ptr,
    running_var_ptr,
    momentum,
    eps,
    parts,
    channels,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Chan's merge of the programs' statistics, in a fixed order."""
    wait_for_previous_kernel(OVERLAP)
    allow_next_kernel(OVERLAP)  # its few programs are all resident
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
    deviation = mean - merged[None, :]
    variance_sum = tl.sum(spread + count * deviation * deviation, axis=0)
    finish_statistics(
        total, merged, variance_sum, channel, channels, statistics_ptr, running_mean_ptr, running_var_ptr, momentum, eps
    )


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def normalise_kernel(
    x_ptr,
    statistics_ptr,
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
    slope = load_channel(statistics_ptr + channels, channel, channels, 1.0)
    slope *= load_channel(weight_ptr, channel, channels, 1.0)
    bias = load_channel(bias_ptr, channel, channels, 0.0)
    FOLD: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    SCALED: tl.constexpr = keep_ptr is not None and (ACTIVATION is None or ACTIVATION == "relu")
    if SCALED:  # relu commutes with the scale
        slope *= scale
        bias *= scale
    if FOLD:  # one instruction per element; for fp32 input the mean must be subtracted first, or digits cancel
        bias -= mean * slope
    mean, slope, bias = repeat_over_depth(mean, DEPTH), repeat_over_depth(slope, DEPTH), repeat_over_depth(bias, DEPTH)
    # From the last rows to the first: what the previous pass read last may still be in L2.
    program = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    for step in range(steps):
        tile = program * steps + steps - 1 - step
        base, element, inside, number, within = tile_addresses(
            tile, rows, channels, length, segments, DEPTH, ROWS, GROUPS, CHANNELS_LAST, WHOLE
        )
        x = tl.load(x_ptr + base + element, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if FOLD:
            z = x * slope + bias
        else:
            z = (x - mean) * slope + bias
        if keep_ptr is None:
            y = activate(z, ACTIVATION)
        else:
            key_seed, key_offset = load_key(key_ptr, seed, offset)
            if ACTIVATION == "relu":
                y, bits = relu_and_drop(z, key_seed, key_offset, number, threshold, y_ptr.dtype.element_ty)
            else:
                keep = kept(z, key_seed, key_offset, number, threshold)
                y = activate(z, ACTIVATION)
                if not SCALED:
                    y *= scale
                y = tl.where(keep, y, 0.0)
                bits = pack_bits(keep)
            tl.store(keep_ptr + number, bits, mask=within)
        tl.store(y_ptr + base + element, y.to(y_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


def batch_statistics(
    x: torch.Tensor,
    layout: Layout,
    statistics: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    *,
    momentum: float,
    eps: float,
) -> None:
    """Fill statistics (`[3, channels]` fp32: mean, 1 / standard deviation, unbiased variance), update the running ones."""
    shape = STATISTICS_TILE[x.element_size()]
    tiles = tiling(layout, shape)
    overlap = overlaps(x)
    parts = None
    if tiles.parts > 1:
        parts = torch.empty((tiles.parts, 3, layout.channels), dtype=torch.float32, device=x.device)
    launch(
        statistics_kernel,
        (tiles.parts, tiles.columns),
        (x, parts, statistics, running_mean, running_var),
        (momentum, eps),
        tiles.sizes,
        (*tiles.constants, overlap),
        num_warps=shape.warps,
    )
    if parts is not None:
        launch(
            merge_statistics_kernel,
            (ceil_div(layout.channels, MERGE_CHANNELS),),
            (parts, statistics, running_mean, running_var),
            (momentum, eps),
            (tiles.parts, layout.channels),
            (min(MERGE_PARTS, next_power_of_2(tiles.parts)), MERGE_CHANNELS, overlap),
            num_warps=MERGE_WARPS,
            launch_pdl=overlap,
        )


def normalise(
    x: torch.Tensor,
    layout: Layout,
    statistics: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    keep: torch.Tensor | None,
    *,
    activation: str | None,
    p: float,
    key: DropoutKey,
) -> None:
    """Fill y and, for dropout, keep (`[lines, ceil(inner / 8)]` bytes)."""
    shape = NORMALISE_TILE[x.element_size()]
    tiles = tiling(layout, shape)
    overlap = overlaps(x)
    launch(
        normalise_kernel,
        (tiles.parts, tiles.columns),
        (x, statistics, weight, bias, y, keep, key.memory),
        (key.seed, key.offset, keep_threshold(p), keep_scale(p)),
        tiles.sizes,
        (*tiles.constants, activation, overlap),
        num_warps=shape.warps,
        launch_pdl=overlap,
    )
