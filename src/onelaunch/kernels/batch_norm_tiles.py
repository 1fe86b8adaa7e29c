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


class TileShape(NamedTuple):
    groups: int  # of 8 elements in a tile
    most_groups: int  # of them along memory; the rest of the tile goes down the rows
    programs: int  # about as many, at most
    unroll: int  # tiles whose loads are in flight together
    warps: int = 4


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
        channel = group[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    else:
        channel = tl.program_id(1) + tl.zeros((1, 1, 1), tl.int32)
    return channel


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
    constants: tuple[int, int, bool]  # rows and groups of a tile, channels last


@functools.lru_cache(1024)
def tiling(layout: Layout, shape: TileShape) -> Tiling:
    groups = min(shape.most_groups, next_power_of_2(cdiv(layout.inner, 8)))
    rows = shape.groups // groups
    blocks = cdiv(layout.inner, groups * 8)
    if layout.length == 0:
        tile_rows, columns, segments = layout.samples, blocks, 1
    else:
        tile_rows, columns, segments = layout.samples * blocks, layout.channels, blocks
    tiles = cdiv(tile_rows, rows)
    # A power of two: the step count is an argument, and few values of it mean few compiled kernels.
    steps = next_power_of_2(cdiv(tiles * columns, shape.programs))
    sizes = (tile_rows, layout.channels, layout.length, segments, steps)
    return Tiling(cdiv(tiles, steps), columns, sizes, (rows, groups, layout.length == 0))
