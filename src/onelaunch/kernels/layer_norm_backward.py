"""The backward pass of layer norm in one pass over memory: dx, and the sums over rows that are dweight and dbias.

A program takes every `programs`-th row and keeps its part of the sums in registers; a second, small kernel adds the parts in a
fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import next_power_of_2
from onelaunch.kernels.activation_dropout import column_sums
from onelaunch.kernels.launch import launch

PROGRAMS = 1056  # eight per multiprocessor of an H200


@triton.jit
def layer_norm_backward_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, dx_ptr, parts_ptr, rows, units, BLOCK: tl.constexpr
):  # fmt: skip
    """`parts`: fp32 (programs, 2, units), each program's sums of dy times the normalised x, and of dy."""
    unit = tl.arange(0, BLOCK)
    inside = unit < units
    weight = tl.load(weight_ptr + unit, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offset = tl.cast(row, tl.int64) * units + unit
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalised = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        scaled = dy * weight
        along = tl.sum(normalised * scaled, axis=0) / units
        mean = tl.sum(scaled, axis=0) / units
        dx = (scaled - normalised * along - mean) * rstd
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight += dy * normalised
        dbias += dy
    part_ptr = parts_ptr + tl.program_id(0) * 2 * units + unit
    tl.store(part_ptr, dweight, mask=inside)
    tl.store(part_ptr + units, dbias, mask=inside)


def layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor,
    sums: torch.Tensor,
) -> None:  # fmt: skip
    """Fill dx and sums (2, units), dweight and dbias. dy, x, dx are contiguous (rows, units); mean and rstd fp32 (rows,)."""
    rows, units = x.shape
    programs = min(rows, PROGRAMS)
    parts = torch.empty(programs, 2 * units, dtype=torch.float32, device=x.device)
    block = next_power_of_2(units)
    tensors = (dy, x, mean, rstd, weight, dx, parts)
    warps = max(1, min(16, block // 256))
    launch(layer_norm_backward_kernel, (programs,), tensors, (), (rows, units), (block,), num_warps=warps)
    column_sums(parts, sums.view(-1))
