"""The backward pass of cross-entropy: rescale the gradient that the forward pass wrote, or compute it from the logits.

The forward pass writes the gradient for an upstream gradient of one. Rescaling multiplies it by the actual one. Where that is
exactly one, as in `loss.backward()`, the programs exit without touching the gradient.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.cross_entropy_row_tiles import boundary_elements, first_position, own_pieces, shifted_pieces
from onelaunch.kernels.dependent_launch import overlaps, wait_for_previous_kernel
from onelaunch.kernels.launch import launch


@triton.jit
def rescale_kernel(
    dx_ptr, upstream_ptr, count_ptr, out_ptr, rows, n, steps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """out = dx * upstream, times rows / count if the forward pass divided by all rows. Writes nothing if the factor is one."""
    wait_for_previous_kernel(OVERLAP)
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
def _gradient(
    x_pointers, dx_pointers, mask, position, target, counts, largest, log_total, upstream, smoothing, classes
):
    x = tl.load(x_pointers, mask=mask, other=float("-inf")).to(tl.float32)
    softmax = tl.exp(x - largest[:, None] - log_total[:, None])
    expected = tl.where(position == target[:, None], 1 - smoothing, 0.0) + smoothing / classes
    dx = tl.where(counts[:, None], (softmax - expected) * upstream[:, None], 0.0)
    tl.store(dx_pointers, dx.to(dx_pointers.dtype.element_ty), mask=mask)


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
    WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr,
    UPSTREAM_PER_ROW: tl.constexpr,
):
    """The gradient from the logits and their log-sum-exp, for fp16: its gradient must not be rounded before it is scaled."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    target = tl.load(target_ptr + row, mask=row_inside, other=0)
    largest = tl.load(lse_ptr + 2 * row, mask=row_inside, other=0.0)
    log_total = tl.load(lse_ptr + 2 * row + 1, mask=row_inside, other=0.0)
    if UPSTREAM_PER_ROW:
        upstream = tl.load(upstream_ptr + row, mask=row_inside, other=0.0).to(tl.float32)
    else:
        upstream = tl.load(upstream_ptr).to(tl.float32) + tl.zeros((ROWS,), tl.float32)
    if count_ptr is not None:
        upstream = upstream / tl.load(count_ptr)
    base, shift = first_position(row, classes, row_stride, WIDTH, SHIFTED)
    out_base, _ = first_position(row, classes, classes, WIDTH, SHIFTED)
    position = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    own = own_pieces(position, shift[:, None], classes, WIDTH, SHIFTED) & row_inside[:, None]
    x_ptr += base[:, None]
    dx_ptr += out_base[:, None]
    counts = target != ignore_index
    target += shift
    _gradient(
        x_ptr + position,
        dx_ptr + position,
        own,
        position,
        target,
        counts,
        largest,
        log_total,
        upstream,
        smoothing,
        classes,
    )
    if SHIFTED and tl.program_id(1) == 0:
        edge, on_edge = boundary_elements(shift[:, None], classes, WIDTH)
        on_edge &= row_inside[:, None]
        _gradient(
            x_ptr + edge, dx_ptr + edge, on_edge, edge, target, counts, largest, log_total, upstream, smoothing, classes
        )


def rescale(dx: torch.Tensor, upstream: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor, rows: int) -> None:
    """out = dx * upstream (and * rows / count); where out is dx and the factor is one, the gradient is not touched."""
    n = dx.numel()
    block = 2048
    # Programs that find a factor of one exit at once; a grid much larger than the chip would still take microseconds.
    steps = max(1, next_power_of_2(ceil_div(n, block * 1024)))
    grid = (ceil_div(n, block * steps),)
    overlap = overlaps(dx)
    tensors, constants = (dx, upstream, count, out), (block, overlap)
    launch(rescale_kernel, grid, tensors, (float(rows),), (n, steps), constants, num_warps=8, launch_pdl=overlap)


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
    """Fill dx from the logits and the two parts of each row's log-sum-exp; `upstream` is a scalar or one number per row."""
    rows, classes = x.shape
    width, shifted = shifted_pieces(classes, x.stride(0), x.element_size())
    block = min(2048, next_power_of_2(classes))
    tile_rows = max(1, 1024 // block)
    launch(
        gradient_kernel,
        (ceil_div(rows, tile_rows), ceil_div(classes + width - 1 if shifted else classes, block)),
        (x, target, lse, upstream, count, dx),
        (smoothing,),
        (rows, classes, x.stride(0), ignore_index),
        (tile_rows, block, width, shifted, upstream.dim() == 1),
    )
