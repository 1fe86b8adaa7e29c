"""Cross-entropy of rows of logits: loss and gradient in one pass that reads the logits once and writes the gradient once.

A row stays in registers between its maximum, its sum and its gradient. The gradient is written for an upstream gradient of
one; cross_entropy_backward.py rescales it to the actual one.

A target outside `[0, classes)` that is not `ignore_index` makes the loss NaN instead of reading past the row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.cross_entropy_long import long_rows, scaled_distance
from onelaunch.kernels.cross_entropy_row_tiles import as_line, as_rows, offsets, piece_width, positions_in_line
from onelaunch.kernels.dependent_launch import allow_next_kernel, overlaps, wait_for_previous_kernel
from onelaunch.kernels.launch import launch, launch_again, needs_triton

ALONE_ELEMENTS = 8192  # a batch of at most this many elements takes one program: one launch instead of two
REGISTER_CLASSES = 8192  # the longest row that a program holds in registers; longer rows are read a second time from L2
FEW_CLASSES = 32  # with at most this many classes, a thread takes a whole row
# With at most this many classes, a warp takes a row, in the tiles below. 32768 x 1000 bf16: 43 us, against 65 us with a row
# spread over four warps.
WARP_CLASSES = 1024
TILE_ELEMENTS, TILE_WARPS = 1024, 4
COUNT_ROWS, MAX_COUNTS = 1024, 64  # rows counted per iteration, and the largest number of counting programs


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def cross_entropy_kernel(
    x_ptr,
    target_ptr,
    count_ptr,
    loss_ptr,
    scalar_loss_ptr,
    lse_ptr,
    dx_ptr,
    partial_ptr,
    smoothing,
    gradient_scale,
    rows,
    classes,
    row_stride,
    ignore_index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    COUNTS: tl.constexpr,
    SMOOTH: tl.constexpr,
    ALONE: tl.constexpr,
    MEAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program takes one tile of whole rows.

    `FEW` is the number of classes where a thread takes a row, else 0. cross_entropy_row_tiles.py defines `PIECE` and `WIDTH`.

    A row counts unless its target is `ignore_index`. The gradient is scaled by `gradient_scale`, or by one over the sum of the
    COUNTS numbers at `count_ptr`. `partial` has one element for the number of all rows that count, then per program the sum of
    its losses and its number of rows that count.
    """
    allow_next_kernel(OVERLAP)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    row = first_row + tl.arange(0, ROWS)
    row_inside = row < rows
    if FEW:
        classes = FEW
    target = tl.load(target_ptr + row, mask=row_inside, other=0)
    counts = row_inside & (target != ignore_index)
    valid = (target >= 0) & (target < classes)
    column = tl.arange(0, BLOCK)
    hit = column[None, :] == target[:, None]
    line_row, line_column, line_first = positions_in_line(ROWS, BLOCK, PIECE, WIDTH)
    line_row = first_row + line_row
    line_inside = (line_row < rows) & (line_first < classes)
    line = tl.load(x_ptr + offsets(line_row, row_stride, line_column, WIDTH), mask=line_inside, other=float("-inf"))
    x = as_rows(line, ROWS, BLOCK, PIECE).to(tl.float32)
    if FEW:
        picked = tl.sum(tl.where(hit, x, 0.0), axis=1)
    else:
        picked = tl.load(x_ptr + row * row_stride + target, mask=counts & valid, other=0.0).to(tl.float32)

    largest = tl.where(row_inside, tl.max(x, axis=1), 0.0)
    exponential = tl.exp2(scaled_distance(x, largest[:, None], x_ptr.dtype.element_ty == tl.bfloat16))
    total = tl.where(row_inside, tl.sum(exponential, axis=1), 1.0)
    loss = (1 - smoothing) * (largest - picked) + tl.log(total)  # this order keeps digits of logits far from 0
    if SMOOTH:
        inside = row_inside[:, None] & (column < classes)[None, :]
        loss += smoothing * (tl.sum(tl.where(inside, largest[:, None] - x, 0.0), axis=1) / classes)
    loss = tl.where(counts, tl.where(valid, loss, float("nan")), 0.0)

    if loss_ptr is not None:
        tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row_inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + 2 * row, largest, mask=row_inside)
        tl.store(lse_ptr + 2 * row + 1, tl.log(total), mask=row_inside)
    if scalar_loss_ptr is not None:
        program_loss, program_count = tl.reduce((loss, counts.to(tl.float32)), 0, _add_both)
        # A single program's sums are the result, and it knows the number of rows that count before it scales the gradient.
        if ALONE:
            if MEAN:
                program_loss = program_loss / program_count
                gradient_scale = 1.0 / tl.maximum(program_count, 1.0)
            tl.store(scalar_loss_ptr, program_loss.to(scalar_loss_ptr.dtype.element_ty))
            if partial_ptr is not None:
                tl.store(partial_ptr, program_count)
        else:
            tl.store(partial_ptr + 1 + 2 * tl.program_id(0), program_loss)
            tl.store(partial_ptr + 2 + 2 * tl.program_id(0), program_count)
    if dx_ptr is not None:
        if COUNTS:
            wait_for_previous_kernel(OVERLAP)
            gradient_scale = 1.0 / tl.sum(tl.load(count_ptr + tl.arange(0, COUNTS)), axis=0)
        dx = exponential * (gradient_scale / total)[:, None] - tl.where(hit, (1 - smoothing) * gradient_scale, 0.0)
        if SMOOTH:
            dx -= smoothing * gradient_scale / classes
        dx = tl.where(counts[:, None], dx, 0.0).to(dx_ptr.dtype.element_ty)
        if FEW:  # a warp stores its rows as one contiguous range, not each thread its own row
            inside = row_inside[:, None] & (column < classes)[None, :]
            tl.store(dx_ptr + row[:, None] * classes + column[None, :], dx, mask=inside)
        else:
            line = as_line(dx, ROWS, BLOCK, PIECE)
            tl.store(dx_ptr + offsets(line_row, classes, line_column, WIDTH), line, mask=line_inside)


@triton.jit
def count_rows_kernel(target_ptr, count_ptr, rows, ignore_index, steps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Per program, the number of its rows that count."""
    allow_next_kernel(OVERLAP)
    first = tl.program_id(0).to(tl.int64) * steps * BLOCK
    count = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        row = first + step * BLOCK + tl.arange(0, BLOCK)
        count += (tl.load(target_ptr + row, mask=row < rows, other=ignore_index) != ignore_index).to(tl.int32)
    tl.store(count_ptr + tl.program_id(0), tl.sum(count, axis=0).to(tl.float32))


@triton.jit
def mean_loss_kernel(partial_ptr, loss_ptr, parts, BLOCK: tl.constexpr, MEAN: tl.constexpr, OVERLAP: tl.constexpr):
    """Add the programs' sums in a fixed order; the number of rows that count goes to the first element of `partial`."""
    wait_for_previous_kernel(OVERLAP)
    allow_next_kernel(OVERLAP)
    loss = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        loss += tl.load(partial_ptr + 1 + 2 * part, mask=part < parts, other=0.0)
        count += tl.load(partial_ptr + 2 + 2 * part, mask=part < parts, other=0.0)
    total, rows = tl.reduce((loss, count), 0, _add_both)
    if MEAN:
        total = total / rows
    tl.store(loss_ptr, total.to(loss_ptr.dtype.element_ty))
    tl.store(partial_ptr, rows)


class Tile(NamedTuple):
    """A tile of whole rows: the first five constants of the kernel, and its number of warps."""

    rows: int
    block: int
    few: int
    piece: int
    width: int
    warps: int


@functools.lru_cache(1024)
def _tile(rows: int, classes: int, row_stride: int, element_size: int) -> Tile:
    block, width = next_power_of_2(classes), piece_width(classes, row_stride, element_size)
    piece = block
    if rows * block <= ALONE_ELEMENTS:
        tile_rows = next_power_of_2(rows)
        warps = 4 if tile_rows * block <= 4096 else 8
    elif classes <= FEW_CLASSES:
        # 65536 rows of 2, 8, 10, 16, 32 classes in fp32 on an H200, in us with mean and rescale: one warp 5.6, 5.8, 5.8, 6.2,
        # 8.9; two 4.5, 5.5, 6.2, 6.6, 9.7; four 4.4, 5.4, 6.2, 6.6, 9.7. 2^20 rows of 10 classes: 47, 31, 32 us.
        warps = 4 if block <= 8 and rows > 32_768 else 2 if rows > 100_000 else 1
        tile_rows = 32 * warps
    elif block <= WARP_CLASSES:
        warps = TILE_WARPS
        tile_rows = max(warps, TILE_ELEMENTS // block)
        lanes = 32 * warps * block // TILE_ELEMENTS  # threads per row: all elements of a thread are in one row
        piece = width * min(32, max(1, lanes))
    else:
        tile_rows, warps = 1, 4 if block <= 4096 else 8
    # With fewer rows per tile, a row would be spread over threads of several warps: NaN with Triton 3.6.
    few = classes if classes <= FEW_CLASSES and tile_rows >= 32 * warps else 0
    return Tile(tile_rows, block, few, width if few else piece, width, warps)


def cross_entropy_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    loss: torch.Tensor,
    *,
    lse: torch.Tensor | None,
    dx: torch.Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: str,
    count_first: bool = False,
) -> torch.Tensor | None:
    """Fill the outputs that are given, from `[rows, classes]` logits with contiguous rows.

    `loss` is a scalar, or one number per row when `reduction` is "none". `lse` (`[rows, 2]` fp32) receives each row's maximum
    and the logarithm of its sum of exponentials relative to that maximum (their sum would be rounded). `dx` receives the
    gradient for an upstream gradient of one. For a mean it is divided by the number of rows that count where that is known in
    time (`count_first`, or a single program), else by the number of all rows.

    Returns a buffer whose first element is the number of rows that count; None for "none", or if one program wrote `dx`.
    """
    rows, classes = x.shape
    single = reduction != "none"
    mean = reduction == "mean"
    overlap = overlaps(x)
    per_row, scalar = (None, loss) if single else (loss, None)
    tile = _tile(rows, classes, x.stride(0), x.element_size()) if classes <= REGISTER_CLASSES else None
    parts = ceil_div(rows, tile.rows) if tile else rows
    alone = parts == 1 and tile is not None
    partial, count, counts = None, None, 0
    if single and not (alone and dx is not None):  # otherwise the number of rows is not needed
        if count_first and mean and dx is not None and not alone:
            counts = min(MAX_COUNTS, next_power_of_2(ceil_div(rows, COUNT_ROWS)))
        after = ceil_div(1 + 2 * parts, 4) * 4  # aligned to 16 bytes, like a separate allocation
        partial = torch.empty(after + counts if counts else 1 + 2 * parts, dtype=torch.float32, device=x.device)
        if counts:
            count = partial[after:]
            count_rows(target, ignore_index, count)
    scale = 1 / rows if mean else 1.0
    if tile is None:
        long_rows(x, (target, count, per_row, lse, dx, partial), smoothing, scale, ignore_index, counts)
    else:
        launch(
            cross_entropy_kernel,
            (parts,),
            (x, target, count, per_row, scalar, lse, dx, partial),
            (smoothing, scale),
            (rows, classes, x.stride(0), ignore_index),
            (*tile[:-1], counts, smoothing > 0, alone, mean, overlap and not alone),
            num_warps=tile.warps,
            launch_pdl=overlap and counts > 0,
        )
    if partial is not None and not alone:
        block, warps = _one_program(parts)
        constants = (block, mean, overlap)
        launch(mean_loss_kernel, (1,), (partial, loss), (), (parts,), constants, num_warps=warps, launch_pdl=overlap)
    return partial


class SmallLoss:
    """Loss (mean or sum) and gradient of contiguous logits that one program takes, with a launch prepared once.

    At this size the host's time is the whole time.
    """

    def __init__(self, x: torch.Tensor, *, smoothing: float, ignore_index: int, reduction: str) -> None:
        rows, classes = x.shape
        *tile, self.warps = _tile(rows, classes, classes, x.element_size())
        mean = reduction == "mean"
        self.device = x.get_device()
        self.values, self.sizes = (smoothing, 1 / rows if mean else 1.0), (rows, classes, classes, ignore_index)
        self.constants = (*tile, 0, smoothing > 0, True, mean, False)
        self.compiled: Any = None

    @staticmethod
    def takes(rows: int, classes: int) -> bool:
        """Whether one program takes a batch of this size."""
        return rows * next_power_of_2(classes) <= ALONE_ELEMENTS

    def __call__(self, x: torch.Tensor, target: torch.Tensor, loss: torch.Tensor, dx: torch.Tensor) -> None:
        compiled, from_x, from_target = self.compiled, x.data_ptr(), target.data_ptr()
        aligned = not (from_x | from_target) & 15  # the compiled kernel assumes it
        if compiled and aligned and self.device == torch._C._cuda_getDevice() and not needs_triton():
            pointers = (from_x, from_target, None, None, loss.data_ptr(), None, dx.data_ptr(), None)
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            launch_again(compiled, (1,), stream, (*pointers, *self.values, *self.sizes, *self.constants))
            return
        tensors, numbers = (x, target, None, None, loss, None, dx, None), (self.values, self.sizes, self.constants)
        compiled = launch(cross_entropy_kernel, (1,), tensors, *numbers, num_warps=self.warps)
        if aligned:
            self.compiled = compiled


def _one_program(n: int) -> tuple[int, int]:
    """(block, warps) of a single program that adds n numbers in as few iterations as possible."""
    block = min(8192, max(1024, next_power_of_2(n)))
    return block, block // 512 if block > 1024 else 4


def count_rows(target: torch.Tensor, ignore_index: int, counts: torch.Tensor) -> None:
    """Fill `counts` (fp32) with partial counts of the rows that count; their sum is the number."""
    rows, overlap = target.numel(), overlaps(target)
    steps = ceil_div(rows, COUNT_ROWS * counts.numel())
    sizes = (rows, ignore_index, steps)
    launch(count_rows_kernel, (counts.numel(),), (target, counts), (), sizes, (COUNT_ROWS, overlap))
