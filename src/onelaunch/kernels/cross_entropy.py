"""Cross-entropy of rows of logits: loss and gradient in one pass, read once and written once.

A row stays in registers between its maximum, its sum and its gradient, so the logits are read from memory once. The
gradient is written for an upstream gradient of one; cross_entropy_backward.py makes it that of the true one.

A target outside `[0, classes)` that is not `ignore_index` makes the loss NaN rather than reading past the row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from onelaunch.kernels.cross_entropy_long import long_rows, scaled_distance
from onelaunch.kernels.launch import cdiv, launch, launch_again, needs_triton, next_power_of_2
from onelaunch.kernels.overlap import begin, overlaps, release

ALONE_ELEMENTS = 8192  # a batch this small is one program: one launch instead of two
REGISTER_CLASSES = 8192  # the longest row a program holds in registers; of longer ones it reads the second time from L2
MOST_COUNTED = 65_536  # rows by one program, eight trips to memory; more are counted by PyTorch's own kernels
FEW_CLASSES = 32  # up to so many, a thread takes a whole row


@triton.jit
def _row_a_thread(
    x_ptr, rows, row_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr, CLASSES: tl.constexpr, WIDTH: tl.constexpr
):
    """A tile of `[ROWS, BLOCK]` logits in fp32, -inf outside; no thread need ask another for a row's maximum or sum.

    Loaded as one line of pieces of WIDTH elements, the same piece of all rows before the next: threads that follow each
    other get rows that do, and all of a row's pieces go to one. The shape it then takes moves nothing.
    """
    number = tl.arange(0, ROWS * BLOCK)
    piece = number // (WIDTH * ROWS) * WIDTH
    row = tl.program_id(0).to(tl.int64) * ROWS + number // WIDTH % ROWS
    element = row * row_stride + piece + number % WIDTH
    element = tl.max_contiguous(tl.multiple_of(element, WIDTH), WIDTH)
    x = tl.load(x_ptr + element, mask=(row < rows) & (piece < CLASSES), other=float("-inf")).to(tl.float32)
    return tl.reshape(tl.permute(tl.reshape(x, (BLOCK // WIDTH, ROWS, WIDTH)), (1, 0, 2)), (ROWS, BLOCK))


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
    WIDTH: tl.constexpr,
    SMOOTH: tl.constexpr,
    ALONE: tl.constexpr,
    MEAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of whole rows a program.

    `FEW` is the number of classes where a thread takes a row, whose elements then come `WIDTH` at a time; else 0.

    The gradient is scaled by `gradient_scale`, or by one over the number in `count_ptr`. `partial` takes, after a first
    place for the number of all rows that count, each program's sum of losses and its number of such rows.
    """
    release(OVERLAP)
    if count_ptr is not None:
        gradient_scale = 1.0 / tl.load(count_ptr).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_inside = row < rows
    if FEW:
        classes = FEW
    inside = row_inside[:, None] & (column < classes)[None, :]
    target = tl.load(target_ptr + row, mask=row_inside, other=0)
    counts = row_inside & (target != ignore_index)
    valid = (target >= 0) & (target < classes)
    hit = column[None, :] == target[:, None]
    if FEW:
        x = _row_a_thread(x_ptr, rows, row_stride, ROWS, BLOCK, FEW, WIDTH)
        picked = tl.sum(tl.where(hit, x, 0.0), axis=1)
    else:
        element = row[:, None] * row_stride + column[None, :]
        x = tl.load(x_ptr + element, mask=inside, other=float("-inf")).to(tl.float32)
        picked = tl.load(x_ptr + row * row_stride + target, mask=counts & valid, other=0.0).to(tl.float32)

    largest = tl.where(row_inside, tl.max(x, axis=1), 0.0)
    exponential = tl.exp2(scaled_distance(x, largest[:, None], x_ptr.dtype.element_ty == tl.bfloat16))
    total = tl.where(row_inside, tl.sum(exponential, axis=1), 1.0)
    loss = (1 - smoothing) * (largest - picked) + tl.log(total)  # in this order: logits may be far from 0
    if SMOOTH:
        loss += smoothing * (tl.sum(tl.where(inside, largest[:, None] - x, 0.0), axis=1) / classes)
    loss = tl.where(counts, tl.where(valid, loss, float("nan")), 0.0)

    if loss_ptr is not None:
        tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row_inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + 2 * row, largest, mask=row_inside)
        tl.store(lse_ptr + 2 * row + 1, tl.log(total), mask=row_inside)
    if scalar_loss_ptr is not None:
        program_loss, program_count = tl.reduce((loss, counts.to(tl.float32)), 0, _add_both)
        # One program: its sums are the result, and it knows how many rows count before it scales the gradient.
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
        dx = exponential * (gradient_scale / total)[:, None] - tl.where(hit, (1 - smoothing) * gradient_scale, 0.0)
        if SMOOTH:
            dx -= smoothing * gradient_scale / classes
        dx = tl.where(counts[:, None], dx, 0.0)
        tl.store(dx_ptr + row[:, None] * classes + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def count_rows_kernel(target_ptr, count_ptr, rows, ignore_index, BLOCK: tl.constexpr):
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        count += (tl.load(target_ptr + row, mask=row < rows, other=ignore_index) != ignore_index).to(tl.int32)
    tl.store(count_ptr, tl.sum(count, axis=0).to(tl.int64))


@triton.jit
def mean_loss_kernel(partial_ptr, loss_ptr, parts, BLOCK: tl.constexpr, MEAN: tl.constexpr, OVERLAP: tl.constexpr):
    """Adds the programs' sums in a fixed order; the number of rows that count goes to the first place of `partial`."""
    begin(OVERLAP)
    release(OVERLAP)
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
    """Of whole rows: the first four of the kernel's constants, and its warps."""

    rows: int
    block: int
    few: int
    width: int
    warps: int


@functools.lru_cache(1024)
def _tile(rows: int, classes: int, row_stride: int, element_size: int) -> Tile:
    block = next_power_of_2(classes)
    few, width = 0, 1
    if classes <= FEW_CLASSES:
        few, width = classes, math.gcd(classes, row_stride, 16 // element_size)
    if rows * block <= ALONE_ELEMENTS:
        tile_rows = next_power_of_2(rows)
    elif few:
        # Warps of 65536 rows of 2, 8, 10, 16, 32 fp32 on an H200, us with mean and rescale: one 5.6, 5.8, 5.8, 6.2, 8.9; two
        # 4.5, 5.5, 6.2, 6.6, 9.7; four 4.4, 5.4, 6.2, 6.6, 9.7. Of 2^20 rows of 10: 47, 31, 32.
        warps = 4 if block <= 8 and rows > 32_768 else 2 if rows > 100_000 else 1
        return Tile(32 * warps, block, few, width, warps)
    else:
        tile_rows = max(1, 1024 // block)
    warps = 4 if tile_rows * block <= 4096 else 8 if tile_rows * block <= 8192 else 16
    if tile_rows < 32 * warps:  # a row would lie in several threads, apart and in other warps: NaN with Triton 3.6
        few, width = 0, 1
    return Tile(tile_rows, block, few, width, warps)


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
    """Fills what is given, from `[rows, classes]` logits whose rows are contiguous.

    `loss` is a scalar, or one number a row when `reduction` is "none"; `lse` (`[rows, 2]` fp32) takes each row's
    largest and the logarithm of its sum of exponentials relative to that (their sum would be rounded); `dx` the
    gradient for an upstream gradient of one, divided for a mean by the number of rows that count where that is known in time
    (`count_first`, or one program), else by the number of all rows. Unless one program wrote `dx`, or for "none", a buffer
    comes back whose first number is how many rows count.
    """
    rows, classes = x.shape
    single = reduction != "none"
    mean = reduction == "mean"
    overlap = overlaps(x)
    per_row, scalar = (None, loss) if single else (loss, None)
    tile = _tile(rows, classes, x.stride(0), x.element_size()) if classes <= REGISTER_CLASSES else None
    parts = cdiv(rows, tile.rows) if tile else rows
    alone = parts == 1 and tile is not None
    count = partial = None
    if single and not (alone and dx is not None):  # alone and with the gradient at hand, nobody will ask for the number
        counted = count_first and mean and not alone
        after = cdiv(1 + 2 * parts, 4) * 4  # on 16 bytes, as memory of its own would lie
        partial = torch.empty(after + 2 if counted else 1 + 2 * parts, dtype=torch.float32, device=x.device)
        count = count_rows(target, ignore_index, partial[after:].view(torch.int64)) if counted else None
    if tile is None:
        outputs = (target, count, per_row, lse, dx, partial)
        long_rows(x, outputs, smoothing, 1 / rows if mean else 1.0, ignore_index)
    else:
        launch(
            cross_entropy_kernel,
            (parts,),
            (x, target, count, per_row, scalar, lse, dx, partial),
            (smoothing, 1 / rows if mean else 1.0),
            (rows, classes, x.stride(0), ignore_index),
            (*tile[:-1], smoothing > 0, alone, mean, overlap and not alone),
            num_warps=tile.warps,
        )
    if partial is not None and not alone:
        block, warps = _one_program(parts)
        constants = (block, mean, overlap)
        launch(mean_loss_kernel, (1,), (partial, loss), (), (parts,), constants, num_warps=warps, launch_pdl=overlap)
    return partial


class SmallLoss:
    """Loss and gradient of a batch that one program takes, with a launch that is prepared once: at this size the host's time
    is all there is. Of contiguous logits, and of a mean or a sum."""

    def __init__(self, x: torch.Tensor, *, smoothing: float, ignore_index: int, reduction: str) -> None:
        rows, classes = x.shape
        *tile, self.warps = _tile(rows, classes, classes, x.element_size())
        mean = reduction == "mean"
        self.device = x.get_device()
        self.values, self.sizes = (smoothing, 1 / rows if mean else 1.0), (rows, classes, classes, ignore_index)
        self.constants = (*tile, smoothing > 0, True, mean, False)
        self.compiled: Any = None

    @staticmethod
    def takes(rows: int, classes: int) -> bool:
        return rows * next_power_of_2(classes) <= ALONE_ELEMENTS

    def __call__(self, x: torch.Tensor, target: torch.Tensor, loss: torch.Tensor, dx: torch.Tensor) -> None:
        compiled, from_x, from_target = self.compiled, x.data_ptr(), target.data_ptr()
        aligned = not (from_x | from_target) & 15  # which the compiled kernel counts on
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
    """(block, warps) of a program that adds up n numbers: in as few trips to memory as it may take."""
    block = min(8192, max(1024, next_power_of_2(n)))
    return block, block // 512 if block > 1024 else 4


def count_rows(target: torch.Tensor, ignore_index: int, count: torch.Tensor) -> torch.Tensor:
    """How many rows count, on the device: in `count` (int64), or for many rows in memory of its own."""
    if target.numel() > MOST_COUNTED:
        return (target != ignore_index).sum()
    block, warps = _one_program(target.numel())
    launch(count_rows_kernel, (1,), (target, count), (), (target.numel(), ignore_index), (block,), num_warps=warps)
    return count
