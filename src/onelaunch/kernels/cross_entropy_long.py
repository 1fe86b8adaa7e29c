"""Cross-entropy of rows too long for registers: read twice, the second time from L2; the gradient written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.kernels.launch import launch, next_power_of_2
from onelaunch.kernels.tiles import LOG2_E

# A row of whole 16-byte pieces comes in four blocks, all on their way at once: 64 elements of 2 bytes a thread, 64 registers.
# 8192 x 32768 bf16 on an H200, us: 268; a block of 8192 at a time 297; the whole row kept in registers 336. The hints to L2
# are worth 30 of them. In a loop over such lots the compiler takes 98 registers: 343.
WARPS, BLOCK, WHOLE_BYTES = 16, 8192, 65536
SHORT_LOG2_E = tl.constexpr(47274 / 32768)  # in 16 bits: times the 8 of a bf16 number it fits into fp32, unrounded


@triton.jit
def short_slope(largest):
    """log2(e) in 16 bits, to 5e-6, for rows of bf16. From where on a number below `largest` has no share in its softmax, less
    by a power of two, so that `largest` times it stays below 2 ** 15: it neither overflows nor swallows what is added."""
    power = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 140 << 23)  # of fp32's bits; 2 ** 13 has 140
    less = (127 << 23) - (power - (140 << 23))
    return SHORT_LOG2_E * less.to(tl.float32, bitcast=True)


@triton.jit
def scaled_distance(x, largest, SHORT: tl.constexpr):
    """(x - largest) * log2(e). `SHORT`, for bf16 numbers: in one instruction, with no rounding before its own."""
    if SHORT:
        slope = short_slope(largest)
        distance = x * slope - largest * slope
    else:
        distance = (x - largest) * LOG2_E
    return distance


@triton.jit
def _chunk(x_ptr, column, classes):
    return tl.load(x_ptr + column, mask=column < classes, other=float("-inf"), eviction_policy="evict_last")


@triton.jit
def _largest(x):
    return tl.max(x, axis=1).to(tl.float32)


@triton.jit
def _exponentials(x, largest):
    return tl.sum(tl.exp2(scaled_distance(x.to(tl.float32), largest[:, None], x.dtype == tl.bfloat16)), axis=1)


@triton.jit
def _finite(largest):
    """Not -inf, of which inf - inf would come."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def long_row_kernel(
    x_ptr,
    target_ptr,
    count_ptr,
    loss_ptr,
    lse_ptr,
    dx_ptr,
    partial_ptr,
    smoothing,
    gradient_scale,
    classes,
    row_stride,
    ignore_index,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """One row a program: its maximum and sum, then the gradient while the row is still in L2."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    valid = (target >= 0) & (target < classes)
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    # One maximum for the elements of a thread's loads: few exponentials more than elements.
    if WHOLE:
        a, b = _chunk(x_ptr, lane, classes), _chunk(x_ptr, BLOCK + lane, classes)
        c, d = _chunk(x_ptr, 2 * BLOCK + lane, classes), _chunk(x_ptr, 3 * BLOCK + lane, classes)
        largest = tl.maximum(tl.maximum(_largest(a), _largest(b)), tl.maximum(_largest(c), _largest(d)))
        some = _finite(largest)
        total = _exponentials(a, some) + _exponentials(b, some) + _exponentials(c, some) + _exponentials(d, some)
    else:
        largest = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK // 8,), tl.float32)
        for start in range(0, classes, BLOCK):
            x = _chunk(x_ptr, start + lane, classes)
            new_largest = tl.maximum(largest, _largest(x))
            some = _finite(new_largest)
            total = total * tl.exp2((largest - some) * LOG2_E) + _exponentials(x, some)
            largest = new_largest
    top = tl.max(largest, axis=0)
    sum_of_all = tl.sum(total * tl.exp2((largest - top) * LOG2_E), axis=0)  # relative to the largest
    picked = tl.load(x_ptr + target, mask=valid, other=0.0).to(tl.float32)
    loss = (1 - smoothing) * (top - picked) + tl.log(sum_of_all)
    if lse_ptr is not None:
        tl.store(lse_ptr + 2 * row, top)
        tl.store(lse_ptr + 2 * row + 1, tl.log(sum_of_all))
    below = tl.zeros((BLOCK // 8,), tl.float32)  # how far the logits are below the largest, in all
    if SMOOTH or dx_ptr is not None:
        if count_ptr is not None:
            gradient_scale = 1.0 / tl.load(count_ptr).to(tl.float32)
        # The scale goes into the exponent: nothing to multiply. A row that does not count gets 2 ** -inf.
        shift = tl.where(counts, tl.log2(sum_of_all) - tl.log2(tl.where(counts, gradient_scale, 1.0)), float("inf"))
        gradient_scale = tl.where(counts, gradient_scale, 0.0)
        for start in range(0, classes, BLOCK):
            inside = start + lane < classes
            x = tl.load(x_ptr + start + lane, mask=inside, other=float("-inf"), eviction_policy="evict_first")
            if SMOOTH:
                below += tl.sum(tl.where(inside, top - x.to(tl.float32), 0.0), axis=1)
            if dx_ptr is not None:
                if x.dtype == tl.bfloat16:
                    slope = short_slope(top)
                    dx = tl.exp2(x.to(tl.float32) * slope - (top * slope + shift))
                else:
                    dx = tl.exp2((x.to(tl.float32) - top) * LOG2_E - shift)
                if (target >= start) & (target < start + BLOCK):
                    dx -= tl.where(start + lane == target, (1 - smoothing) * gradient_scale, 0.0)
                if SMOOTH:
                    dx -= smoothing * gradient_scale / classes
                tl.store(dx_ptr + row * classes + start + lane, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if SMOOTH:
        loss += smoothing * (tl.sum(below, axis=0) / classes)
    loss = tl.where(counts, tl.where(valid, loss, float("nan")), 0.0)
    if loss_ptr is not None:
        tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
    if partial_ptr is not None:
        tl.store(partial_ptr + 1 + 2 * row, loss)
        tl.store(partial_ptr + 2 + 2 * row, counts.to(tl.float32))


def long_rows(
    x: torch.Tensor,
    tensors: tuple[torch.Tensor | None, ...],
    smoothing: float,
    gradient_scale: float,
    ignore_index: int,
) -> None:
    """`tensors`: the kernel's after x."""
    rows, classes = x.shape
    size = x.element_size()
    in_pieces = x.stride(0) * size % 16 == 0 and classes * size % 16 == 0
    whole = in_pieces and next_power_of_2(classes) * size <= WHOLE_BYTES
    launch(
        long_row_kernel,
        (rows,),
        (x, *tensors),
        (smoothing, gradient_scale),
        (classes, x.stride(0), ignore_index),
        (next_power_of_2(classes) // 4 if whole else BLOCK, whole, smoothing > 0),
        num_warps=WARPS,
    )
