"""How cross-entropy's kernels access rows of any length: in pieces of 16 bytes, with a chosen assignment to threads.

A tile of rows is loaded and stored as a 1-D line, whose order decides which thread and warp gets which elements. In between
it has the shape `[ROWS, BLOCK]`.

Contiguous long rows of, say, 50257 elements begin at any alignment. Loaded from its first element on, such a row would take
one load per element. Positions in it are therefore counted from the start of the 16-byte piece that the row begins in
(`SHIFTED`). A row shares the pieces at its two ends with its neighbours; these boundary elements are accessed one by one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.jit
def positions_in_line(ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr):
    """(row, column, first column of the element's run of WIDTH columns) for each element of a tile's line.

    The line holds PIECE columns of all rows, then the next PIECE columns of all rows. Consecutive threads get consecutive
    elements. Hence a row is in one thread where PIECE equals WIDTH, and in one warp where PIECE is 32 WIDTHs and the number of
    rows is a multiple of the number of warps.
    """
    number = tl.arange(0, ROWS * BLOCK)
    row = number // PIECE % ROWS
    first = number // (PIECE * ROWS) * PIECE + number // WIDTH * WIDTH % PIECE
    return row, first + number % WIDTH, first


@triton.jit
def offsets(row, row_stride, column, WIDTH: tl.constexpr):
    """Offsets of a line's elements in memory. Each run of WIDTH elements is contiguous and aligned to WIDTH."""
    element = row * row_stride + column
    return tl.max_contiguous(tl.multiple_of(element, WIDTH), WIDTH)


@triton.jit
def as_rows(line, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    return tl.reshape(tl.permute(tl.reshape(line, (BLOCK // PIECE, ROWS, PIECE)), (1, 0, 2)), (ROWS, BLOCK))


@triton.jit
def as_line(tile, ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr):
    return tl.reshape(tl.permute(tl.reshape(tile, (ROWS, BLOCK // PIECE, PIECE)), (1, 0, 2)), (ROWS * BLOCK,))


@triton.jit
def first_position(row, classes, row_stride, WIDTH: tl.constexpr, SHIFTED: tl.constexpr):
    """(offset of the first piece of a row (int64) in memory, position of the row's first element within that piece)."""
    if SHIFTED:
        begin = row * classes
        base = begin // WIDTH * WIDTH
        shift = (begin - base).to(tl.int32)
    else:
        base = row * (row_stride // WIDTH * WIDTH)
        shift = (row * 0).to(tl.int32)
    return base, shift


@triton.jit
def own_pieces(position, shift, classes, WIDTH: tl.constexpr, SHIFTED: tl.constexpr):
    """Mask of the positions in pieces that belong to this row only."""
    if SHIFTED:
        piece = position // WIDTH * WIDTH
        own = (piece >= shift) & (piece + WIDTH <= shift + classes)
    else:
        own = position < classes // WIDTH * WIDTH
    return own


@triton.jit
def boundary_elements(shift, classes, WIDTH: tl.constexpr):
    """Positions of the two pieces at a row's ends, which it shares with its neighbours, and the mask of those in this row."""
    number = tl.arange(0, 2 * WIDTH)
    end = shift + classes
    at_front = number < WIDTH
    position = tl.where(at_front, number, end // WIDTH * WIDTH + number - WIDTH)
    return position, (at_front & (shift > 0) & (position >= shift)) | (~at_front & (position < end))


def piece_width(classes: int, row_stride: int, element_size: int) -> int:
    """The number of elements that one load may take, such that aligned loads cover every row from its first element on."""
    return math.gcd(classes, row_stride, 16 // element_size)


def shifted_pieces(classes: int, row_stride: int, element_size: int) -> tuple[int, bool]:
    """(WIDTH, SHIFTED) for long rows."""
    width, whole = piece_width(classes, row_stride, element_size), 16 // element_size
    shifted = width < whole and row_stride == classes >= 2 * whole
    return (whole, True) if shifted else (width, False)
