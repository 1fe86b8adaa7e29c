"""One hidden stage of an MLP in a training run: `dropout(act(x · Wᵀ + b))` forward, and the input gradient backward.

These kernels differ from the level-1 ops in what a run needs. Rows may be gathered from the data set while they are loaded.
Weights may be the fp32 masters themselves: a 16-bit copy, which the update has to maintain, would cost a small batch more
bytes than it saves. Dropout draws the run's masks, which the backward pass computes again instead of loading them.
tests/engines/graph/test_parity.py covers them with every activation.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_arguments import Clock, Epilogue, Rows
from onelaunch.engines.graph.kernels.run_state import (
    EPOCH_STEP,
    RUN_STEP,
    as_features,
    derivative,
    dropout_keep,
    gathered_rows,
    launch_step,
)
from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.gemm_tile import GemmTile
from onelaunch.kernels.linear import tile_of
from onelaunch.kernels.tiles import activate

BAND = 8


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def hidden_forward_kernel(
    x_ptr,
    order_ptr,
    w_ptr,
    bias_ptr,
    h_ptr,
    z_ptr,
    control_ptr,
    table_ptr,
    seed: tl.int64,
    step: tl.int32,
    threshold: tl.int32,
    layer: tl.int32,
    scale,
    batch,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    tile_m, tile_n = tile_of(tl.program_id(0), batch, n, BLOCK_M, BLOCK_N, BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    unit = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    source = row.to(tl.int64)
    taken = row < batch
    if order_ptr is not None:
        source, taken = gathered_rows(order_ptr, table_ptr, tl.load(control_ptr + EPOCH_STEP) + step, row, batch)
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + source[:, None] * k + inner[None, :], mask=taken[:, None] & (inner < k)[None, :], other=0)
        w = tl.load(
            w_ptr + unit.to(tl.int64)[None, :] * k + inner[:, None],
            mask=(unit < n)[None, :] & (inner < k)[:, None],
            other=0.0,
        )
        x = as_features(x, h_ptr.dtype.element_ty)
        z = tl.dot(x, w.to(x.dtype), z, input_precision=PRECISION)
    allow_next_kernel(OVERLAP)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + unit, mask=unit < n, other=0.0)[None, :]
    inside = (row < batch)[:, None] & (unit < n)[None, :]
    element = row.to(tl.int64)[:, None] * n + unit[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + element, z.to(z_ptr.dtype.element_ty), mask=inside)
    h = activate(z, ACTIVATION)
    if DROPOUT:
        run_step = tl.load(control_ptr + RUN_STEP) + step
        keep = dropout_keep(seed, run_step, layer, row, tile_n * BLOCK_N, threshold, BLOCK_M, BLOCK_N)
        h = tl.where(keep, h * scale, 0.0)
    tl.store(h_ptr + element, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def input_gradient_kernel(
    dz_ptr,
    w_ptr,
    h_ptr,
    z_ptr,
    dx_ptr,
    sums_ptr,
    control_ptr,
    seed: tl.int64,
    step: tl.int32,
    threshold: tl.int32,
    layer: tl.int32,
    keep_scale,
    inverse_scale,
    batch,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_Z: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dx = dz·W times the derivative of the previous stage; stores each tile's column sums in row `tile_m` of `sums`."""
    wait_for_previous_kernel(OVERLAP)
    tile_m, tile_k = tile_of(tl.program_id(0), batch, k, BLOCK_M, BLOCK_K, BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, n, BLOCK_N):
        if TMA:
            dz = dz_ptr.load([tile_m * BLOCK_M, start])
            w = w_ptr.load([start, tile_k * BLOCK_K])
        else:
            unit = start + tl.arange(0, BLOCK_N)
            dz = tl.load(
                dz_ptr + row.to(tl.int64)[:, None] * n + unit[None, :],
                mask=(row < batch)[:, None] & (unit < n)[None, :],
                other=0.0,
            )
            w = tl.load(
                w_ptr + unit.to(tl.int64)[:, None] * k + column[None, :],
                mask=(unit < n)[:, None] & (column < k)[None, :],
                other=0.0,
            )
        dx = tl.dot(dz, w.to(dz.dtype), dx, input_precision=PRECISION)
    allow_next_kernel(OVERLAP)
    inside = (row < batch)[:, None] & (column < k)[None, :]
    element = row.to(tl.int64)[:, None] * k + column[None, :]
    if DROPOUT:
        run_step = tl.load(control_ptr + RUN_STEP) + step
        keep = dropout_keep(seed, run_step, layer, row, tile_k * BLOCK_K, threshold, BLOCK_M, BLOCK_K)
        dx = tl.where(keep, dx * keep_scale, 0.0)
    if ACTIVATION is not None:
        if FROM_Z:
            saved = tl.load(z_ptr + element, mask=inside, other=0.0)
        else:
            saved = tl.load(h_ptr + element, mask=inside, other=0.0)
        dx *= derivative(saved, inverse_scale, ACTIVATION, FROM_Z)
    if sums_ptr is not None:
        tl.store(sums_ptr + tile_m * k + column, tl.sum(tl.where(inside, dx, 0.0), axis=0), mask=column < k)
    tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["step"])
def gather_kernel(
    x_ptr, order_ptr, out_ptr, control_ptr, table_ptr, step: tl.int32, batch, k, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = the step's rows in the dtype of the products; positions past the end of a short batch become zero."""
    wait_for_previous_kernel(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, taken = gathered_rows(order_ptr, table_ptr, tl.load(control_ptr + EPOCH_STEP) + step, row, batch)
    inside = (column < k)[None, :]
    x = tl.load(x_ptr + source[:, None] * k + column[None, :], mask=taken[:, None] & inside, other=0)
    out = as_features(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * k + column[None, :], out, mask=(row < batch)[:, None] & inside)


def hidden_forward(
    x: Rows, weight: torch.Tensor, bias: torch.Tensor | None, h: torch.Tensor, z: torch.Tensor | None, epilogue: Epilogue,
    clock: Clock, *, tile: GemmTile, tf32: bool,
) -> None:  # fmt: skip
    """Fills h `[batch, n]` and, if given, z, the values before the activation."""
    batch, n = h.shape
    seed, threshold, layer, scale = epilogue.dropout_values
    launch_step(
        clock,
        hidden_forward_kernel,
        (ceil_div(batch, tile.m) * ceil_div(n, tile.n),),
        (x.values, x.order, weight, bias, h, z, clock.control, clock.table),
        (seed, clock.step, threshold, layer, scale),
        (batch, n, weight.shape[1]),
        (tile.m, tile.n, tile.k, BAND, epilogue.activation, epilogue.p > 0, "tf32" if tf32 else "ieee"),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def input_gradient(
    dz: torch.Tensor, weight: torch.Tensor, h: torch.Tensor, z: torch.Tensor | None, dx: torch.Tensor,
    sums: torch.Tensor | None, before: Epilogue, clock: Clock, *, tile: GemmTile, tf32: bool,
) -> None:  # fmt: skip
    """Fills dx `[batch, k]` and sums `[ceil(batch / tile.m), k]`; `tile` is (batch, k, n), `before` made h."""
    batch, n = dz.shape
    k = weight.shape[1]
    seed, threshold, layer, scale = before.dropout_values
    gradient: Any = dz
    source: Any = weight
    if tile.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        gradient = TensorDescriptor(dz, list(dz.shape), list(dz.stride()), [tile.m, tile.k])
        source = TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [tile.k, tile.n])
    launch_step(
        clock,
        input_gradient_kernel,
        (ceil_div(batch, tile.m) * ceil_div(k, tile.n),),
        (gradient, source, h, z, dx, sums, clock.control),
        (seed, clock.step, threshold, layer, scale, 1 - before.p),
        (batch, n, k),
        (
            tile.m, tile.n, tile.k, BAND, before.activation, before.saves_input, before.p > 0, "tf32" if tf32 else "ieee",
            tile.tma,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def gather(x: Rows, out: torch.Tensor, clock: Clock) -> None:
    """Fills out `[batch, k]` with this step's rows."""
    batch, k = out.shape
    block = min(1024, next_power_of_2(k))
    rows = max(1, 2048 // block)
    launch_step(
        clock,
        gather_kernel,
        (ceil_div(batch, rows), ceil_div(k, block)),
        (x.values, x.order, out, clock.control, clock.table),
        (clock.step,),
        (batch, k),
        (rows, block),
    )
