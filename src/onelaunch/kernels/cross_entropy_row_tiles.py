"""How cross-entropy's kernels walk over rows of any length: pieces of 16 bytes, and which thread has which.

A tile of rows is loaded and stored as one line, whose order says what a thread, a warp gets; between, it is `[ROWS, BLOCK]`.

Long rows that lie one behind the other, of 50257 elements say, begin on any element; loaded from their own first on, every
element would be a load. Their places are counted from the piece they begin in (`SHIFTED`). The pieces at a row's two ends,
its rim, belong to its neighbours too: they are taken one element at a time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.jit
def positions_in_line(ROWS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, WIDTH: tl.constexpr):
    """The row, the column and the first column of its WIDTH, of each element of a tile's line: PIECE columns of all rows, then
    the next of all. Threads that follow each other get what does, so that a row lies in one thread where a PIECE is a WIDTH,
    and in one warp where it is 32 of them and the rows are a multiple of the warps."""
    number = tl.arange(0, ROWS * BLOCK)
    row = number // PIECE % ROWS
    first = number // (PIECE * ROWS) * PIECE + number // WIDTH * WIDTH % PIECE
    return row, first + number % WIDTH, first


@triton.jit
def offsets(row, row_stride, column, WIDTH: tl.constexpr):
    """Of a line's elements in memory, every WIDTH of which follow each other from a multiple of it on."""
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
    """Where the pieces of a row (int64) begin in memory, and the place of its first element among them."""
    if SHIFTED:
        begin = row * classes
        base = begin // WIDTH * WIDTH
        shift = (begin - base).to(tl.int32)
    else:
        base = row * (row_stride // WIDTH * WIDTH)
        shift = (row * 0).to(tl.int32)
    return base, shift


@triton.jit
def own_pieces(place, shift, classes, WIDTH: tl.constexpr, SHIFTED: tl.constexpr):
    """Which places belong to pieces that are all the row's own."""
    if SHIFTED:
        piece = place // WIDTH * WIDTH
        own = (piece >= shift) & (piece + WIDTH <= shift + classes)
    else:
        own = place < classes // WIDTH * WIDTH
    return own


@triton.jit
def boundary_elements(shift, classes, WIDTH: tl.constexpr):
    """The places of the pieces that are not, and which of them are the row's."""
    number = tl.arange(0, 2 * WIDTH)
    end = shift + classes
    at_front = number < WIDTH
    place = tl.where(at_front, number, end // WIDTH * WIDTH + number - WIDTH)
    return place, (at_front & (shift > 0) & (place >= shift)) | (~at_front & (place < end))


def piece_width(classes: int, row_stride: int, element_size: int) -> int:
    """How many elements of such rows may be moved together, all of them from their first on."""
    return math.gcd(classes, row_stride, 16 // element_size)


def shifted_pieces(classes: int, row_stride: int, element_size: int) -> tuple[int, bool]:
    """(WIDTH, SHIFTED) of long rows."""
    width, whole = piece_width(classes, row_stride, element_size), 16 // element_size
    shifted = width < whole and row_stride == classes >= 2 * whole
    return (whole, True) if shifted else (width, False)
