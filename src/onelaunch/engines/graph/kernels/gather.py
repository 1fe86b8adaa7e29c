"""Rows of page-locked host memory, gathered over the bus by a few programs, so that training goes on beside them.

The bus is filled by a few ten kilobytes in flight. A kernel with a program per row fills all multiprocessors with waiting
programs, and the training step waits behind them: 134 ms for an epoch that takes 94 ms with rows on the device (H200).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import clamp, next_power_of_2
from onelaunch.kernels.launch import launch

# Programs, and values of a tile. 4 programs fetch 21 GB/s, too little for a step in bf16; 8 slow a step in tf32 as 16 do.
PROGRAMS, TILE, MAX_WIDTH = 6, 16384, 1024


@triton.jit
def gather_rows_kernel(source_ptr, order_ptr, target_ptr, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """target[i] = source[order[i]], in the target's type."""
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        position = first + tl.arange(0, ROWS)
        row = tl.load(order_ptr + position, mask=position < rows, other=0).to(tl.int64)
        for start in range(0, width, WIDTH):
            column = start + tl.arange(0, WIDTH)
            inside = (position < rows)[:, None] & (column < width)[None, :]
            values = tl.load(source_ptr + row[:, None] * width + column[None, :], mask=inside)
            to = target_ptr + position.to(tl.int64)[:, None] * width + column[None, :]
            tl.store(to, values.to(target_ptr.dtype.element_ty), mask=inside)


def gather_rows(source: torch.Tensor, order: torch.Tensor, target: torch.Tensor) -> None:
    """target[i] = source[order[i]] for contiguous matrices, converted where the types differ."""
    rows, width = target.shape
    columns = min(next_power_of_2(width), MAX_WIDTH)
    at_a_time = clamp(1, TILE // columns, 64)
    tensors, constants = (source, order, target), (at_a_time, columns)
    launch(gather_rows_kernel, (PROGRAMS,), tensors, (), (rows, width), constants, num_warps=8)
