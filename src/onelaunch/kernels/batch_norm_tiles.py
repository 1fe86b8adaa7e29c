"""How batch norm's kernels cover memory: tiles of groups of 8 elements, their addresses and their channels.

Two layouts share the kernels. Channels last (`[m, c]`, also N(D)HWC memory): a tile row is part of a row of m.
Channels first (`[n, c, length]`): a tile row is a segment of one channel of one sample, and `program_id(1)` is the channel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.tiles import scattered


class TileShape(NamedTuple):
    depth: int  # groups of 8 elements per thread, in different rows, whose loads are in flight together
    max_groups: int  # along a row of a tile; the remaining threads take further rows
    programs: int  # about the largest number of programs
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
    """Addresses of a tile, given its number (int64). `WHOLE`: every tile is full, so that no mask is needed.

    Returns the tile's first element; element offsets from there and their mask, `[positions, 8]`; numbers of the groups (for
    dropout) and their mask, `[positions]`.

    A position is one group of one row, row by row. One axis for all positions leaves Triton no choice of the order of threads
    along them (of several axes, 3.6 takes the first first and 3.7 the last): neighbouring threads read neighbouring groups, and
    a thread's DEPTH groups, whose loads are in flight together, are in different rows.
    """
    position = tl.arange(0, DEPTH * ROWS * GROUPS)
    group = position % GROUPS
    row = position // GROUPS
    lane = tl.arange(0, 8)[None, :]
    first = tile * (DEPTH * ROWS)
    present = (row < rows - first) | WHOLE
    if CHANNELS_LAST:  # offsets within the tile fit into 32 bits
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
    """Channels last: the channels of the first `ROWS * GROUPS` positions, `[positions, 8]`. Else the program's, `[1, 1]`."""
    if CHANNELS_LAST:
        group = tl.program_id(1) * GROUPS + tl.arange(0, ROWS * GROUPS) % GROUPS
        channel = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    else:
        channel = tl.program_id(1) + tl.zeros((1, 1), tl.int32)
    return channel


@triton.jit
def mask_repeated_channels(channel, channels, GROUPS: tl.constexpr):
    """The channels for a store: those of the first row, and for repetitions in other rows an index that the mask excludes."""
    if channel.shape[0] > GROUPS:
        channel = tl.where(tl.arange(0, channel.shape[0])[:, None] < GROUPS, channel, channels)
    return channel


@triton.jit
def repeat_over_depth(values, DEPTH: tl.constexpr):
    """Repeat per-channel values, in the shape of `channel_index`, for a tile with DEPTH times as many positions."""
    if DEPTH > 1 and values.shape[0] > 1:
        deep = tl.broadcast_to(values[None, :, :], (DEPTH, values.shape[0], 8))
        values = tl.reshape(deep, (DEPTH * values.shape[0], 8))
    return values


@triton.jit
def sum_of_thread(tile, DEPTH: tl.constexpr):
    """`[DEPTH * positions, 8]` -> `[positions, 8]`: adds what one thread holds, without communication."""
    if DEPTH > 1:
        tile = tl.sum(tl.reshape(tile, (DEPTH, tile.shape[0] // DEPTH, 8)), axis=0)
    return tile


@triton.jit
def sum_per_channel(tile, GROUPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """`[positions, 8]` -> the sums per channel, in the shape of `channel_index`."""
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
    """The order of the elements in memory: `[rows, channels]` if `length` is 0, else `[samples, channels, length]`."""

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
        """Number of elements per channel."""
        return self.samples * max(1, self.length)


class Tiling(NamedTuple):
    """A grid of programs, each of which processes several tiles."""

    parts: int
    columns: int
    sizes: tuple[int, int, int, int, int]  # rows, channels, length, segments, steps: arguments of the kernels
    constants: tuple[int, int, int, bool, bool]  # depth, rows and groups of a tile, channels last, all tiles full


@functools.lru_cache(1024)
def tiling(layout: Layout, shape: TileShape) -> Tiling:
    """The grid and the kernel arguments for a layout."""
    groups = min(shape.max_groups, next_power_of_2(ceil_div(layout.inner, 8)))
    rows = 32 * shape.warps // groups
    blocks = ceil_div(layout.inner, groups * 8)
    if layout.length == 0:
        tile_rows, columns, segments = layout.samples, blocks, 1
    else:
        tile_rows, columns, segments = layout.samples * blocks, layout.channels, blocks
    tiles = ceil_div(tile_rows, rows * shape.depth)
    # A power of two: Triton specialises on some values of the step count, and few values mean few compiled kernels.
    steps = next_power_of_2(ceil_div(tiles * columns, shape.programs))
    sizes = (tile_rows, layout.channels, layout.length, segments, steps)
    whole = tile_rows % (rows * shape.depth * steps) == 0 and layout.inner % (groups * 8) == 0
    return Tiling(ceil_div(tiles, steps), columns, sizes, (shape.depth, rows, groups, layout.length == 0, whole))
