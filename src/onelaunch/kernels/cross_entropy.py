"""Cross-entropy of rows of logits: loss and gradient in one pass, read once and written once.

A row stays in registers between its maximum, its sum and its gradient, so the logits are read from memory once. The
gradient is written for an upstream gradient of one; backward multiplies it by the true one, and when that is exactly one,
as in `loss.backward()`, its programs leave at once without touching memory.

A target outside `[0, classes)` that is not `ignore_index` makes the loss NaN rather than reading past the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.kernels.launch import launch

REGISTER_CLASSES = 65536  # the longest row one program holds in registers; longer ones are read twice


@triton.jit
def cross_entropy_kernel(
    x_ptr,
    target_ptr,
    count_ptr,
    loss_ptr,
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
    SMOOTH: tl.constexpr,
):
    """One tile of whole rows a program.

    The gradient is scaled by `gradient_scale`, or by one over the number in `count_ptr`. `partial` takes the program's
    sum of losses and its number of rows that count.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    row_inside = row < rows
    inside = row_inside[:, None] & (column < classes)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    target = tl.load(target_ptr + row, mask=row_inside, other=0)
    counts = row_inside & (target != ignore_index)
    valid = (target >= 0) & (target < classes)
    hit = column[None, :] == target[:, None]

    largest = tl.where(row_inside, tl.max(x, axis=1), 0.0)
    exponential = tl.exp(x - largest[:, None])
    total = tl.where(row_inside, tl.sum(exponential, axis=1), 1.0)
    lse = largest + tl.log(total)
    picked = tl.sum(tl.where(hit & inside, x, 0.0), axis=1)
    loss = (1 - smoothing) * (lse - picked)
    if SMOOTH:
        logit_sum = tl.sum(tl.where(inside, x, 0.0), axis=1)
        loss += smoothing * (lse - logit_sum / classes)
    loss = tl.where(counts, tl.where(valid, loss, float("nan")), 0.0)

    if loss_ptr is not None:
        tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row_inside)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, lse, mask=row_inside)
    if partial_ptr is not None:
        tl.store(partial_ptr + 2 * tl.program_id(0), tl.sum(loss, axis=0))
        tl.store(partial_ptr + 2 * tl.program_id(0) + 1, tl.sum(counts.to(tl.float32), axis=0))
    if dx_ptr is not None:
        if count_ptr is not None:
            gradient_scale = 1.0 / tl.load(count_ptr).to(tl.float32)
        inverse = gradient_scale / total
        dx = exponential * inverse[:, None]
        dx -= tl.where(hit, (1 - smoothing) * gradient_scale, 0.0)
        if SMOOTH:
            dx -= smoothing * gradient_scale / classes
        dx = tl.where(counts[:, None], dx, 0.0)
        tl.store(dx_ptr + row[:, None] * classes + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def long_row_kernel(
    x_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    partial_ptr,
    smoothing,
    classes,
    row_stride,
    ignore_index,
    BLOCK: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """The loss of one row too long for registers: a running maximum and sum over blocks of it."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    picked = tl.zeros((BLOCK,), tl.float32)
    logit_sum = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < classes
        x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
        new_largest = tl.maximum(largest, x)
        # Lanes that have seen only -inf would compute inf - inf.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = new_largest
        picked += tl.where(column == target, x, 0.0)
        if SMOOTH:
            logit_sum += tl.where(inside, x, 0.0)
    top = tl.max(largest, axis=0)
    lse = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    loss = (1 - smoothing) * (lse - tl.sum(picked, axis=0))
    if SMOOTH:
        loss += smoothing * (lse - tl.sum(logit_sum, axis=0) / classes)
    counts = target != ignore_index
    valid = (target >= 0) & (target < classes)
    loss = tl.where(counts, tl.where(valid, loss, float("nan")), 0.0)
    if loss_ptr is not None:
        tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
    tl.store(lse_ptr + row, lse)
    if partial_ptr is not None:
        tl.store(partial_ptr + 2 * row, loss)
        tl.store(partial_ptr + 2 * row + 1, counts.to(tl.float32))


@triton.jit
def mean_loss_kernel(partial_ptr, loss_ptr, count_ptr, parts, BLOCK: tl.constexpr, MEAN: tl.constexpr):
    """Adds the programs' sums in a fixed order; the number of rows that count goes to `count`."""
    loss = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        loss += tl.load(partial_ptr + 2 * part, mask=part < parts, other=0.0)
        count += tl.load(partial_ptr + 2 * part + 1, mask=part < parts, other=0.0)
    total = tl.sum(loss, axis=0)
    rows = tl.sum(count, axis=0)
    if MEAN:
        total = total / rows
    tl.store(loss_ptr, total.to(loss_ptr.dtype.element_ty))
    if count_ptr is not None:
        tl.store(count_ptr, rows)


@triton.jit
def rescale_kernel(dx_ptr, upstream_ptr, count_ptr, out_ptr, rows, n, steps, BLOCK: tl.constexpr):
    """out = dx * upstream, times rows / count where the gradient was written for every row counting. Nothing where it is one."""
    factor = tl.load(upstream_ptr).to(tl.float32)
    if count_ptr is not None:
        count = tl.load(count_ptr)
        factor *= tl.where(count == 0, 1.0, rows / count)
    if factor != 1.0:
        first = tl.program_id(0).to(tl.int64) * steps * BLOCK
        for step in range(steps):
            element = first + step * BLOCK + tl.arange(0, BLOCK)
            dx = tl.load(dx_ptr + element, mask=element < n, other=0.0).to(tl.float32) * factor
            tl.store(out_ptr + element, dx.to(out_ptr.dtype.element_ty), mask=element < n)


@triton.jit
def gradient_kernel(
    x_ptr,
    target_ptr,
    lse_ptr,
    upstream_ptr,
    count_ptr,
    dx_ptr,
    smoothing,
    rows,
    classes,
    row_stride,
    ignore_index,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    UPSTREAM_PER_ROW: tl.constexpr,
):
    """The gradient from the logits and their log-sum-exp: for fp16, whose gradient must not be rounded before it is scaled."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row_inside = row < rows
    inside = row_inside[:, None] & (column < classes)[None, :]
    x = tl.load(x_ptr + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    target = tl.load(target_ptr + row, mask=row_inside, other=0)
    lse = tl.load(lse_ptr + row, mask=row_inside, other=0.0)
    if UPSTREAM_PER_ROW:
        upstream = tl.load(upstream_ptr + row, mask=row_inside, other=0.0).to(tl.float32)
    else:
        upstream = tl.load(upstream_ptr).to(tl.float32) + tl.zeros((ROWS,), tl.float32)
    if count_ptr is not None:
        upstream = upstream / tl.load(count_ptr)
    softmax = tl.exp(x - lse[:, None])
    wanted = tl.where(column[None, :] == target[:, None], 1 - smoothing, 0.0) + smoothing / classes
    dx = tl.where((target != ignore_index)[:, None], (softmax - wanted) * upstream[:, None], 0.0)
    tl.store(dx_ptr + row[:, None] * classes + column[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _tile(classes: int) -> tuple[int, int, int]:
    """(rows, block, warps) of a tile of whole rows."""
    block = triton.next_power_of_2(classes)
    rows = max(1, 1024 // block)
    warps = 4 if block <= 4096 else 8 if block <= 8192 else 16
    return rows, block, warps


def cross_entropy_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    *,
    loss: torch.Tensor,
    count: torch.Tensor | None,
    lse: torch.Tensor | None,
    dx: torch.Tensor | None,
    smoothing: float,
    ignore_index: int,
    reduction: str,
    precounted: torch.Tensor | None = None,
) -> None:
    """Fills what is given, from `[rows, classes]` logits whose rows are contiguous.

    `loss` is a scalar, or one number a row when `reduction` is "none". `count` (fp32 scalar) takes the number of rows that count;
    `lse` (fp32) the log-sum-exp of each row; `dx` the gradient for an upstream gradient of one, divided for a mean by
    `precounted`, or else by the number of all rows.
    """
    rows, classes = x.shape
    per_row = loss if reduction == "none" else None
    if classes > REGISTER_CLASSES:
        assert lse is not None
        assert dx is None
        parts = rows
        partial = None if per_row is not None else x.new_empty(2 * parts, dtype=torch.float32)
        launch(
            long_row_kernel,
            (rows,),
            (x, target, per_row, lse, partial),
            (smoothing,),
            (classes, x.stride(0), ignore_index),
            (4096, smoothing > 0),
            num_warps=8,
        )
    else:
        tile_rows, block, warps = _tile(classes)
        parts = triton.cdiv(rows, tile_rows)
        partial = None if per_row is not None else x.new_empty(2 * parts, dtype=torch.float32)
        launch(
            cross_entropy_kernel,
            (parts,),
            (x, target, precounted, per_row, lse, dx, partial),
            (smoothing, 1 / rows if reduction == "mean" else 1.0),
            (rows, classes, x.stride(0), ignore_index),
            (tile_rows, block, smoothing > 0),
            num_warps=warps,
        )
    if partial is not None:
        launch(mean_loss_kernel, (1,), (partial, loss, count), (), (parts,), (1024, reduction == "mean"))


def rescale(dx: torch.Tensor, upstream: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor, rows: int) -> None:
    """out = dx times the upstream gradient (and rows / count); where out is dx and the factor one, no memory is touched."""
    n = dx.numel()
    block = 2048
    # Programs that find a factor of one leave at once; a grid much larger than the chip would still take microseconds.
    steps = max(1, triton.next_power_of_2(triton.cdiv(n, block * 1024)))
    grid = (triton.cdiv(n, block * steps),)
    launch(rescale_kernel, grid, (dx, upstream, count, out), (float(rows),), (n, steps), (block,), num_warps=8)


def cross_entropy_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    lse: torch.Tensor,
    upstream: torch.Tensor,
    count: torch.Tensor | None,
    dx: torch.Tensor,
    *,
    smoothing: float,
    ignore_index: int,
) -> None:
    """Fills dx from the logits, given each row's log-sum-exp; `upstream` is a scalar or one number a row."""
    rows, classes = x.shape
    block = min(2048, triton.next_power_of_2(classes))
    tile_rows = max(1, 1024 // block)
    launch(
        gradient_kernel,
        (triton.cdiv(rows, tile_rows), triton.cdiv(classes, block)),
        (x, target, lse, upstream, count, dx),
        (smoothing,),
        (rows, classes, x.stride(0), ignore_index),
        (tile_rows, block, upstream.dim() == 1),
    )
