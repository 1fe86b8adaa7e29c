"""Layer norm and RMS norm over rows, with the dropout and the residual addition before them, in one pass over memory.

A program holds its rows in registers. Rows are `[rows, units]` in memory; a tile has one axis for groups of 8 elements (see
batch_norm_tiles.py for why one) and one for the 8 elements, which share one Philox call and one byte of keep bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import kept, load_key, pack_bits, scattered
from onelaunch.rng import keep_scale, keep_threshold

ELEMENTS_PER_WARP = 1024  # 32 per thread: up to 1024 units, a row needs no barrier
SMALLEST_TILE = 512  # elements; shorter rows share a program


@triton.jit
def row_sums(tile, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """The sum of each row of a tile `[ROWS * GROUPS, 8]`, `[ROWS * GROUPS, 1]`: every group has its row's sum."""
    totals = tl.sum(tl.reshape(tl.sum(tile, axis=1), (ROWS, GROUPS)), axis=1)
    return tl.reshape(tl.broadcast_to(totals[:, None], (ROWS, GROUPS)), (ROWS * GROUPS,))[:, None]


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    statistics_ptr,
    keep_ptr,
    key_ptr,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
    scale,
    eps,
    rows,
    units,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CENTERED: tl.constexpr,
    DROPS: tl.constexpr,
):
    """`CENTERED`: layer norm, which subtracts the mean, not RMS norm. `statistics`: fp32 rstd by row, then the means."""
    position = tl.arange(0, ROWS * GROUPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + position // GROUPS
    group = position % GROUPS
    column = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    present = (row < rows)[:, None]
    inside = present & (column < units)
    element = row[:, None] * units + column

    s = tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + element, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        seed, offset = load_key(key_ptr, seed, offset)
        groups_per_row = tl.cdiv(units, 8)
        number = scattered(row * groups_per_row + group)
        keep = kept(s, seed, offset, number, threshold)
        s = tl.where(keep, s * scale, 0.0)
        if keep_ptr is not None:
            tl.store(keep_ptr + number, pack_bits(keep), mask=(row < rows) & (group < groups_per_row))
    if residual_ptr is not None:
        s += residual
        if x_ptr.dtype.element_ty == residual_ptr.dtype.element_ty:
            s = s.to(x_ptr.dtype.element_ty).to(
                tl.float32
            )  # what is normalised is what is stored; unlike types add in fp32
    elif DROPS:
        s = s.to(x_ptr.dtype.element_ty).to(tl.float32)
    if sum_ptr is not None:
        tl.store(sum_ptr + element, s.to(sum_ptr.dtype.element_ty), mask=inside)

    first_group = present & (group == 0)[:, None]
    if CENTERED:
        mean = row_sums(s, ROWS, GROUPS) / units
        s = tl.where(inside, s - mean, 0.0)
        if statistics_ptr is not None:
            tl.store(statistics_ptr + rows + row[:, None], mean, mask=first_group)
    rstd = tl.rsqrt(row_sums(s * s, ROWS, GROUPS) / units + eps)
    if statistics_ptr is not None:
        tl.store(statistics_ptr + row[:, None], rstd, mask=first_group)
    y = s * rstd
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column < units, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < units, other=0.0).to(tl.float32)
    tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sums: torch.Tensor | None,
    statistics: torch.Tensor | None,
    keep: torch.Tensor | None,
    *,
    eps: float,
    p: float,
    key: DropoutKey,
    centered: bool,
) -> None:
    """Fill y, and for a backward pass: sums, `dropout(x) + residual`; statistics, fp32 `[2, rows]` (`[1, rows]` if not
    centered), rstd and mean; keep, one bit per element by row. All are contiguous."""
    units = x.shape[-1]
    rows = x.numel() // units
    groups = next_power_of_2(ceil_div(units, 8))
    rows_per_program = max(1, SMALLEST_TILE // (8 * groups))
    warps = max(1, min(16, 8 * groups // ELEMENTS_PER_WARP))
    launch(
        norm_forward_kernel,
        (ceil_div(rows, rows_per_program),),
        (x, residual, weight, bias, y, sums, statistics, keep, key.memory),
        (key.seed, key.offset, keep_threshold(p), keep_scale(p), eps),
        (rows, units),
        (rows_per_program, groups, centered, p > 0),
        num_warps=warps,
    )
