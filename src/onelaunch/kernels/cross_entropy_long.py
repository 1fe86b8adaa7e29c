"""Cross-entropy of rows too long for registers: read twice, the second time from L2; the gradient is written once."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import next_power_of_2
from onelaunch.kernels.cross_entropy_row_tiles import boundary_elements, first_position, own_pieces, shifted_pieces
from onelaunch.kernels.dependent_launch import overlaps, wait_for_previous_kernel
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import LOG2_E

# A row of whole 16-byte pieces is loaded as four blocks at once: 64 elements of 2 bytes per thread, 64 registers. 8192 x 32768
# bf16 on an H200: 268 us; one block of 8192 at a time 297 us; the whole row kept in registers 336 us. The eviction hints save
# 30 us. In a loop over such groups of blocks the compiler takes 98 registers: 343 us.
WARPS, WHOLE_BYTES = 16, 65536
# Longer rows, and those that share pieces, are loaded block by block; sizes by element size. 8192 x 50257 bf16, 4096 x 128256
# bf16 and 4096 x 50257 fp32 on an H200, in us: 16 warps with blocks of 8192: 514, 764, 591; of 16384: 511, 710, 586; 32 warps
# with blocks of 8192: 719, 734, 513; of 16384: 682, 715, 562.
LOOP_BLOCK, LOOP_WARPS = {2: 16384, 4: 8192}, {2: 16, 4: 32}
SHORT_LOG2_E = tl.constexpr(47274 / 32768)  # 16 bits: its product with the 8 bits of a bf16 number is exact in fp32


@triton.jit
def short_slope(largest):
    """log2(e) rounded to 16 bits, to 5e-6, for rows of bf16.

    Where |largest| is 2 ** 14 or more, any smaller bf16 number adds nothing to the softmax. The result is then scaled down by
    a power of two, so that `largest` times it stays below 2 ** 15: the product neither overflows nor absorbs what is added.
    """
    # The exponent bits of fp32; those of 2 ** 13 are 140.
    power = tl.maximum(largest.to(tl.int32, bitcast=True) & 0x7F800000, 140 << 23)
    less = (127 << 23) - (power - (140 << 23))
    return SHORT_LOG2_E * less.to(tl.float32, bitcast=True)


@triton.jit
def scaled_distance(x, largest, SHORT: tl.constexpr):
    """(x - largest) * log2(e). `SHORT`, for bf16 numbers: one fused multiply-add, rounded once."""
    if SHORT:
        slope = short_slope(largest)
        distance = x * slope - largest * slope
    else:
        distance = (x - largest) * LOG2_E
    return distance


@triton.jit
def _chunk(x_ptr, position, shift, classes, WIDTH: tl.constexpr, SHIFTED: tl.constexpr):
    own = own_pieces(position, shift, classes, WIDTH, SHIFTED)
    return tl.load(x_ptr + position, mask=own, other=float("-inf"), eviction_policy="evict_last")


@triton.jit
def _largest(x):
    return tl.max(x, axis=1).to(tl.float32)


@triton.jit
def _exponentials(x, largest):
    return tl.sum(tl.exp2(scaled_distance(x.to(tl.float32), largest[:, None], x.dtype == tl.bfloat16)), axis=1)


@triton.jit
def _finite(largest):
    """`largest`, or 0 for -inf, which would give inf - inf."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _scaled_probability(x, top, lower):
    """2 ** ((x - top) * log2(e) - lower)."""
    if x.dtype == tl.bfloat16:
        slope = short_slope(top)
        probability = tl.exp2(x.to(tl.float32) * slope - (top * slope + lower))
    else:
        probability = tl.exp2((x.to(tl.float32) - top) * LOG2_E - lower)
    return probability


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
    WIDTH: tl.constexpr,
    SHIFTED: tl.constexpr,
    SMOOTH: tl.constexpr,
    COUNTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program takes one row: its maximum and sum, then the gradient while the row is still in L2.

    The boundary elements, in pieces that a row shares with its neighbours (`SHIFTED`), are processed as a block of their own.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    counts = target != ignore_index
    valid = (target >= 0) & (target < classes)
    picked = tl.load(x_ptr + row * row_stride + target, mask=valid, other=0.0).to(tl.float32)
    base, shift = first_position(row, classes, row_stride, WIDTH, SHIFTED)
    x_ptr += base
    end = shift + classes
    position = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    # One maximum per 8 elements that a thread loads together: rescaling adds few exponentials.
    if WHOLE:
        a = _chunk(x_ptr, position, shift, classes, WIDTH, SHIFTED)
        b = _chunk(x_ptr, BLOCK + position, shift, classes, WIDTH, SHIFTED)
        c = _chunk(x_ptr, 2 * BLOCK + position, shift, classes, WIDTH, SHIFTED)
        d = _chunk(x_ptr, 3 * BLOCK + position, shift, classes, WIDTH, SHIFTED)
        largest = tl.maximum(tl.maximum(_largest(a), _largest(b)), tl.maximum(_largest(c), _largest(d)))
        some = _finite(largest)
        total = _exponentials(a, some) + _exponentials(b, some) + _exponentials(c, some) + _exponentials(d, some)
    else:
        largest = tl.full((BLOCK // 8,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK // 8,), tl.float32)
        for start in range(0, end, BLOCK):
            x = _chunk(x_ptr, start + position, shift, classes, WIDTH, SHIFTED)
            new_largest = tl.maximum(largest, _largest(x))
            some = _finite(new_largest)
            total = total * tl.exp2((largest - some) * LOG2_E) + _exponentials(x, some)
            largest = new_largest
    top = tl.max(largest, axis=0)
    if SHIFTED:
        edge, on_edge = boundary_elements(shift, classes, WIDTH)
        edge_x = tl.load(x_ptr + edge, mask=on_edge, other=float("-inf"))
        top = tl.maximum(top, tl.max(edge_x, axis=0).to(tl.float32))
    sum_of_all = tl.sum(total * tl.exp2((largest - top) * LOG2_E), axis=0)  # relative to the largest
    below = tl.zeros((BLOCK // 8,), tl.float32)  # sum of the logits' distances from the maximum
    edge_below = 0.0
    if SHIFTED:
        sum_of_all += tl.sum(tl.exp2((edge_x.to(tl.float32) - top) * LOG2_E), axis=0)
        edge_below = tl.sum(tl.where(on_edge, top - edge_x.to(tl.float32), 0.0), axis=0)
    loss = (1 - smoothing) * (top - picked) + tl.log(sum_of_all)
    if lse_ptr is not None:
        tl.store(lse_ptr + 2 * row, top)
        tl.store(lse_ptr + 2 * row + 1, tl.log(sum_of_all))
    if SMOOTH or dx_ptr is not None:
        if COUNTS:
            wait_for_previous_kernel(OVERLAP)
            gradient_scale = 1.0 / tl.sum(tl.load(count_ptr + tl.arange(0, COUNTS)), axis=0)
        # The scale is part of the exponent, which saves a product per element. A row that does not count gets 2 ** -inf.
        lower = tl.where(counts, tl.log2(sum_of_all) - tl.log2(tl.where(counts, gradient_scale, 1.0)), float("inf"))
        gradient_scale = tl.where(counts, gradient_scale, 0.0)
        on_target, everywhere = (1 - smoothing) * gradient_scale, smoothing * gradient_scale / classes
        target += shift
        if dx_ptr is not None:
            out_base, _ = first_position(row, classes, classes, WIDTH, SHIFTED)
            dx_ptr += out_base
        for start in range(0, end, BLOCK):
            own = own_pieces(start + position, shift, classes, WIDTH, SHIFTED)
            x = tl.load(x_ptr + start + position, mask=own, other=float("-inf"), eviction_policy="evict_first")
            if SMOOTH:
                below += tl.sum(tl.where(own, top - x.to(tl.float32), 0.0), axis=1)
            if dx_ptr is not None:
                dx = _scaled_probability(x, top, lower)
                if (target >= start) & (target < start + BLOCK):
                    dx -= tl.where(start + position == target, on_target, 0.0)
                if SMOOTH:
                    dx -= everywhere
                tl.store(dx_ptr + start + position, dx.to(dx_ptr.dtype.element_ty), mask=own)
        if SHIFTED and dx_ptr is not None:
            dx = _scaled_probability(edge_x, top, lower) - tl.where(edge == target, on_target, 0.0) - everywhere
            tl.store(dx_ptr + edge, dx.to(dx_ptr.dtype.element_ty), mask=on_edge)
    if SMOOTH:
        loss += smoothing * ((tl.sum(below, axis=0) + edge_below) / classes)
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
    counts: int,
) -> None:
    """Launch `long_row_kernel`; `tensors` are its tensor arguments after x."""
    rows, classes = x.shape
    size, overlap = x.element_size(), counts > 0 and overlaps(x)
    width, shifted = shifted_pieces(classes, x.stride(0), size)
    whole = not shifted and width * size == 16 and next_power_of_2(classes) * size <= WHOLE_BYTES
    block, warps = (next_power_of_2(classes) // 4, WARPS) if whole else (LOOP_BLOCK[size], LOOP_WARPS[size])
    launch(
        long_row_kernel,
        (rows,),
        (x, *tensors),
        (smoothing, gradient_scale),
        (classes, x.stride(0), ignore_index),
        (block, whole, width, shifted, smoothing > 0, counts, overlap),
        num_warps=warps,
        launch_pdl=overlap,
    )
