"""How batch norm's kernels walk over memory: tiles of groups of 8 elements, their addresses and the channels they belong to.

Two layouts share the kernels. Channels last (`[m, c]`, also N(D)HWC memory): a tile row is a row, channels lie along it.
Channels first (`[n, c, length]`): a tile row is a segment of one channel of one sample, `program_id(1)` is the channel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from onelaunch.kernels.launch import cdiv, next_power_of_2
from onelaunch.kernels.tiles import scattered


class TileShape(NamedTuple):
    depth: int  # groups of 8 elements a thread holds, one below the other, whose loads are in flight together
    most_groups: int  # of a tile along memory; the rest of its threads go down the rows
    programs: int  # about as many, at most
    warps: int = 4


@triton.jit
def tile_addresses(
    tile,
    rows,
    channels,
    length,
    segments,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Of a tile, given its number (int64): where it begins, element offsets from there and mask `[places, 8]`; group numbers
    and mask `[places]`. `WHOLE`: every tile is full, so nothing is masked.

    A place is a group of a row; those of a row follow each other, then comes the next row. One axis for all of them leaves
    Triton no choice of the order in which threads lie along them (of several axes, 3.6 takes the first first and 3.7 the
    last): neighbours read neighbours, and a thread's DEPTH groups, whose loads are in flight together, lie below each other.
    """
    place = tl.arange(0, DEPTH * ROWS * GROUPS)
    group = place % GROUPS
    row = place // GROUPS
    lane = tl.arange(0, 8)[None, :]
    first = tile * (DEPTH * ROWS)
    present = (row < rows - first) | WHOLE
    if CHANNELS_LAST:  # 32-bit offsets in the tile
        inner = channels
        base = first * channels
        group = tl.program_id(1) * GROUPS + group
        groups_per_line = tl.cdiv(inner, 8)
        number = first * groups_per_line + (row * groups_per_line + group)
        column = group[:, None] * 8 + lane
        element = row[:, None] * channels + column
    else:  # neighbouring rows may be samples apart
        inner = length
        base = tile * 0
        line = ((first + row) // segments) * channels + tl.program_id(1)
        group = ((first + row) % segments) * GROUPS + group
        groups_per_line = tl.cdiv(inner, 8)
        number = line * groups_per_line + group
        column = group[:, None] * 8 + lane
        element = line[:, None] * inner + column
    inside = present[:, None] & ((column < inner) | WHOLE)
    return base, element, inside, scattered(number), present & ((group < groups_per_line) | WHOLE)


@triton.jit
def channel_index(ROWS: tl.constexpr, GROUPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """The channels of the first `ROWS * GROUPS` places, `[places, 8]`, or the one of all, `[1, 1]`."""
    if CHANNELS_LAST:
        group = tl.program_id(1) * GROUPS + tl.arange(0, ROWS * GROUPS) % GROUPS
        channel = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        channel = tl.program_id(1) + tl.zeros((1, 1), tl.int32)
    return channel


@triton.jit
def mask_repeated_channels(channel, channels, GROUPS: tl.constexpr):
    """The same channels for who stores: the first row's, and of others one that does not exist."""
    if channel.shape[0] > GROUPS:
        channel = tl.where(tl.arange(0, channel.shape[0])[:, None] < GROUPS, channel, channels)
    return channel


@triton.jit
def repeat_over_depth(values, DEPTH: tl.constexpr):
    """What `channel_index` was asked for, `[places, 8]` or `[1, 1]`, for a whole tile."""
    if DEPTH > 1 and values.shape[0] > 1:
        deep = tl.broadcast_to(values[None, :, :], (DEPTH, values.shape[0], 8))
        values = tl.reshape(deep, (DEPTH * values.shape[0], 8))
    return values


@triton.jit
def sum_of_thread(tile, DEPTH: tl.constexpr):
    """`[DEPTH * places, 8]` -> `[places, 8]`: what one thread holds is added up, and no other is asked."""
    if DEPTH > 1:
        tile = tl.sum(tl.reshape(tile, (DEPTH, tile.shape[0] // DEPTH, 8)), axis=0)
    return tile


@triton.jit
def sum_per_channel(tile, GROUPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """`[places, 8]` -> the sums, in the shape of `channel_index`."""
    if not CHANNELS_LAST:
        tile = tl.sum(tl.sum(tile, axis=1, keep_dims=True), axis=0, keep_dims=True)
    elif tile.shape[0] > GROUPS:
        ROWS: tl.constexpr = tile.shape[0] // GROUPS
        total = tl.sum(tl.reshape(tile, (ROWS, GROUPS, 8)), axis=0, keep_dims=True)
        tile = tl.reshape(tl.broadcast_to(total, (ROWS, GROUPS, 8)), tile.shape)
    return tile


@triton.jit
def load_channel(pointer, channel, channels, default):
    if pointer is not None:
        value = tl.load(pointer + channel, mask=channel < channels, other=0.0).to(tl.float32)
    else:
        value = tl.zeros(channel.shape, tl.float32) + default
    return value


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
    def per_channel(self) -> int:
        """Elements a channel's statistics are over."""
        return self.samples * max(1, self.length)


class Tiling(NamedTuple):
    """A grid of programs, each walking some tiles down memory."""

    parts: int
    columns: int
    sizes: tuple[int, int, int, int, int]  # rows, channels, length, segments, steps, as the kernels take them
    constants: tuple[int, int, int, bool, bool]  # depth, rows and groups of a tile, channels last, tiles all full


@functools.lru_cache(1024)
def tiling(layout: Layout, shape: TileShape) -> Tiling:
    groups = min(shape.most_groups, next_power_of_2(cdiv(layout.inner, 8)))
    rows = 32 * shape.warps // groups
    blocks = cdiv(layout.inner, groups * 8)
    if layout.length == 0:
        tile_rows, columns, segments = layout.samples, blocks, 1
    else:
        tile_rows, columns, segments = layout.samples * blocks, layout.channels, blocks
    tiles = cdiv(tile_rows, rows * shape.depth)
    # A power of two: the step count is an argument, and few values of it mean few compiled kernels.
    steps = next_power_of_2(cdiv(tiles * columns, shape.programs))
    sizes = (tile_rows, layout.channels, layout.length, segments, steps)
    whole = tile_rows % (rows * shape.depth * steps) == 0 and layout.inner % (groups * 8) == 0
    return Tiling(cdiv(tiles, steps), columns, sizes, (shape.depth, rows, groups, layout.length == 0, whole))
