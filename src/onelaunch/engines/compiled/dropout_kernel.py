"""One pass over memory: x times the keep mask of `onelaunch.rng.dropout_keep`, scaled."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_state import dropout_keep
from onelaunch.integers import ceil_div
from onelaunch.kernels.launch import launch
from onelaunch.rng import keep_scale, keep_threshold

ROWS, UNITS = 4, 512  # of a program's tile: 16 elements per thread


@triton.jit(do_not_specialize=["seed", "layer", "threshold"])
def dropout_kernel(
    x_ptr, y_ptr, step_ptr, seed: tl.int64, layer: tl.int64, threshold: tl.int32, scale, rows, units,
    ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) * UNITS
    unit = first + tl.arange(0, UNITS)
    keep = dropout_keep(seed, tl.load(step_ptr), layer, row, first, threshold, ROWS, UNITS)
    inside = (row < rows)[:, None] & (unit < units)[None, :]
    offset = row.to(tl.int64)[:, None] * units + unit[None, :]
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, tl.where(keep, x * scale, 0.0).to(y_ptr.dtype.element_ty), mask=inside)


def dropout(x: torch.Tensor, y: torch.Tensor, step: torch.Tensor, seed: int, layer: int, p: float) -> None:
    """Fill y; x and y are contiguous, with the batch's rows along the first dimension. `step`: an int64 scalar."""
    if x.numel():
        rows, units = len(x), x.numel() // len(x)
        values = (seed, layer, keep_threshold(p), keep_scale(p))
        grid = (ceil_div(units, UNITS), ceil_div(rows, ROWS))
        launch(dropout_kernel, grid, (x, y, step), values, (rows, units), (ROWS, UNITS), num_warps=4)
