"""The backward pass of layer norm and RMS norm in one pass over memory: the gradients of x and of the residual, and the
sums over rows that are dweight and dbias.

A program takes every `programs`-th tile of rows and keeps its part of the sums in registers; a second, small kernel adds the
parts in a fixed order, so that every run gives the same bits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.activation_dropout import column_sums
from onelaunch.kernels.dependent_launch import allow_next_kernel, overlaps
from onelaunch.kernels.launch import launch
from onelaunch.kernels.norm import row_sums
from onelaunch.kernels.tiles import scattered, unpack_bits
from onelaunch.rng import keep_scale

PROGRAMS = 528  # four per multiprocessor of an H200; each writes a row of parts, which more programs would make longer
TILE_ELEMENTS, WARPS = 2048, 8  # 8 per thread; the sums, weight and inputs of more would not leave room for 4 programs


@triton.jit
def norm_backward_kernel(
    dy_ptr,
    dsum_ptr,
    s_ptr,
    statistics_ptr,
    weight_ptr,
    keep_ptr,
    dx_ptr,
    dresidual_ptr,
    parts_ptr,
    scale,
    rows,
    units,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    CENTERED: tl.constexpr,
    SUMS: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`parts`: fp32 (programs, sums, units), each program's sums of dy times the normalised s (with a weight) and of dy
    (if BIASED)."""
    position = tl.arange(0, ROWS * GROUPS)
    group = position % GROUPS
    column = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    groups_per_row = tl.cdiv(units, 8)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < units, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    dbias = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(first, tl.int64) + position // GROUPS
        present = (row < rows)[:, None]
        inside = present & (column < units)
        element = row[:, None] * units + column
        s = tl.load(s_ptr + element, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(statistics_ptr + row[:, None], mask=present, other=0.0)
        if CENTERED:
            s = tl.where(inside, s - tl.load(statistics_ptr + rows + row[:, None], mask=present, other=0.0), 0.0)
        normalised = s * rstd
        scaled = dy
        if weight_ptr is not None:
            dweight += dy * normalised
            scaled = dy * weight
        if BIASED:
            dbias += dy
        total = scaled - normalised * (row_sums(normalised * scaled, ROWS, GROUPS) / units)
        if CENTERED:
            total -= row_sums(scaled, ROWS, GROUPS) / units
        total *= rstd
        if dsum_ptr is not None:
            total += tl.load(dsum_ptr + element, mask=inside, other=0.0).to(tl.float32)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + element, total.to(dresidual_ptr.dtype.element_ty), mask=inside)
        if keep_ptr is not None:
            number = scattered(row * groups_per_row + group)
            bits = tl.load(keep_ptr + number, mask=(row < rows) & (group < groups_per_row), other=0)
            total = tl.where(unpack_bits(bits), total * scale, 0.0)
        tl.store(dx_ptr + element, total.to(dx_ptr.dtype.element_ty), mask=inside)
    allow_next_kernel(OVERLAP)
    if parts_ptr is not None:
        unit = tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
        part_ptr = parts_ptr + tl.program_id(0) * SUMS * units + unit
        if weight_ptr is not None:
            tl.store(part_ptr, tl.sum(tl.reshape(dweight, (ROWS, GROUPS, 8)), axis=0), mask=unit < units)
            part_ptr += units
        if BIASED:
            tl.store(part_ptr, tl.sum(tl.reshape(dbias, (ROWS, GROUPS, 8)), axis=0), mask=unit < units)


def norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    s: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor | None,
    keep: torch.Tensor | None,
    dx: torch.Tensor,
    dresidual: torch.Tensor | None,
    sums: torch.Tensor,
    *,
    p: float,
    centered: bool,
) -> None:
    """Fill dx, dresidual, and sums: dweight (with a weight), then dbias if there is a row for it.

    dy and dsum are the upstream gradients of the norm and of the sum s; `statistics` and `keep` are those of the forward
    pass. All are contiguous.
    """
    units = s.shape[-1]
    rows = s.numel() // units
    groups = next_power_of_2(ceil_div(units, 8))
    rows_per_tile = max(1, TILE_ELEMENTS // (8 * groups))
    programs = min(ceil_div(rows, rows_per_tile), PROGRAMS)
    biased = len(sums) > (weight is not None)
    warps = max(WARPS, min(16, groups // 64))
    parts = torch.empty(programs, sums.numel(), dtype=torch.float32, device=s.device) if len(sums) else None
    launch(
        norm_backward_kernel,
        (programs,),
        (dy, dsum, s, statistics, weight, keep, dx, dresidual, parts),
        (keep_scale(p),),
        (rows, units),
        (rows_per_tile, groups, centered, len(sums), biased, overlaps(s) and parts is not None),
        num_warps=warps,
    )
    if parts is not None:
        column_sums(parts, sums.view(-1))
