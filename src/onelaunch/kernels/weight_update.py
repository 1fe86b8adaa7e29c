"""Gradients of a Linear's weights with the optimizer in the GEMM's epilogue: dW lives in registers and is used up there.

Two ways, by batch size. `weight_update_kernel` gives each program a tile of W and walks down the batch; input gradients come
from another kernel. `strip_kernel` is for small batches, where reading W is all there is to it: a program owns a strip of
columns, and while a tile of W passes by it takes part in dX and is updated, one read and one write instead of two reads
and a write.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.kernels.launch import cdiv, launch
from onelaunch.kernels.optimizer import updated
from onelaunch.kernels.run_arguments import Clock, Ending, Rows, Tile, Weights
from onelaunch.kernels.run_state import (
    add_up_loss,
    as_number,
    gathered_rows,
    launch_with_descriptors,
    run_keep,
    slope,
)


@triton.jit
def update_bias(
    gradient, column, n, bias_ptr, first_ptr, second_ptr, table_ptr, index, OPTIMIZER: tl.constexpr
):  # fmt: skip
    inside = column < n
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    first = first_ptr
    second = second_ptr
    if first_ptr is not None:
        first = first_ptr + column
    if second_ptr is not None:
        second = second_ptr + column
    bias = updated(bias, gradient, first, second, inside, table_ptr, index, OPTIMIZER)
    tl.store(bias_ptr + column, bias, mask=inside)


@triton.jit
def update_weights(
    gradient, place, inside, w_ptr, copy_ptr, first_ptr, second_ptr, table_ptr, index, OPTIMIZER: tl.constexpr
):  # fmt: skip
    w = tl.load(w_ptr + place, mask=inside, other=0.0)
    first = first_ptr
    second = second_ptr
    if first_ptr is not None:
        first = first_ptr + place
    if second_ptr is not None:
        second = second_ptr + place
    w = updated(w, gradient, first, second, inside, table_ptr, index, OPTIMIZER)
    tl.store(w_ptr + place, w, mask=inside)
    if copy_ptr is not None:
        tl.store(copy_ptr + place, w.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["step"])
def weight_update_kernel(
    dz_ptr,
    x_ptr,
    order_ptr,
    w_ptr,
    copy_ptr,
    first_ptr,
    second_ptr,
    bias_ptr,
    bias_first_ptr,
    bias_second_ptr,
    sums_ptr,
    loss_parts_ptr,
    losses_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    batch,
    n,
    k,
    parts,
    loss_parts,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """W -= lr * dzᵀ·x over one tile of W. `sums`, where given, holds `parts` rows whose sum is the bias gradient.

    The last of a step's kernels also adds up the step's loss.
    """
    index = tl.load(control_ptr) + step
    tiles_n = tl.cdiv(n, BLOCK_N)
    tiles_k = tl.cdiv(k, BLOCK_K)
    # Bands of tile rows: programs side by side share operands in L2.
    tile = tl.program_id(0)
    band = tile // (BAND * tiles_k)
    height = tl.minimum(tiles_n - band * BAND, BAND)
    within = tile % (BAND * tiles_k)
    tile_n = band * BAND + within % height
    tile_k = within // height
    unit = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    gradient = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    bias_gradient = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, batch, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        if TMA:
            dz = dz_ptr.load([start, tile_n * BLOCK_N])
            x = x_ptr.load([start, tile_k * BLOCK_K])
        else:
            dz = tl.load(
                dz_ptr + row.to(tl.int64)[:, None] * n + unit[None, :],
                mask=(row < batch)[:, None] & (unit < n)[None, :],
                other=0.0,
            )
            source = row.to(tl.int64)
            taken = row < batch
            if order_ptr is not None:
                source, taken = gathered_rows(order_ptr, table_ptr, index, row, batch)
            x = tl.load(
                x_ptr + source[:, None] * k + column[None, :], mask=taken[:, None] & (column < k)[None, :], other=0
            )
            if order_ptr is not None:
                x = as_number(x).to(dz.dtype)
        gradient = tl.dot(tl.trans(dz), x, gradient, input_precision=PRECISION)
        if sums_ptr is None and bias_ptr is not None:
            bias_gradient += tl.sum(dz.to(tl.float32), axis=0)
    place = unit.to(tl.int64)[:, None] * k + column[None, :]
    inside = (unit < n)[:, None] & (column < k)[None, :]
    update_weights(gradient, place, inside, w_ptr, copy_ptr, first_ptr, second_ptr, table_ptr, index, OPTIMIZER)
    if bias_ptr is not None:  # noqa: SIM102 (known when compiling, unlike the tile)
        if tile_k == 0:
            if sums_ptr is not None:
                for part in range(parts):
                    bias_gradient += tl.load(sums_ptr + part * n + unit, mask=unit < n, other=0.0)
            update_bias(
                bias_gradient, unit, n, bias_ptr, bias_first_ptr, bias_second_ptr, table_ptr, index, OPTIMIZER
            )  # fmt: skip
    if losses_ptr is not None:  # noqa: SIM102
        if tile == 0:
            add_up_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts)


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def strip_kernel(
    dz_ptr,
    h_ptr,
    z_ptr,
    dx_ptr,
    w_ptr,
    first_ptr,
    second_ptr,
    bias_ptr,
    bias_first_ptr,
    bias_second_ptr,
    control_ptr,
    table_ptr,
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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_Z: tl.constexpr,
    DROPOUT: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Columns `[BLOCK_K]` of one Linear: dx = (dz·W) times the slope of the stage before, and W -= lr * dzᵀ·h."""
    index = tl.load(control_ptr) + step
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    own = (row < batch)[:, None] & (column < k)[None, :]
    element = row[:, None] * k + column[None, :]
    h = tl.load(h_ptr + element, mask=own, other=0.0)
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for start in range(0, n, BLOCK_N):
        unit = start + tl.arange(0, BLOCK_N)
        dz = tl.load(
            dz_ptr + row[:, None] * n + unit[None, :], mask=(row < batch)[:, None] & (unit < n)[None, :], other=0.0
        )
        place = unit.to(tl.int64)[:, None] * k + column[None, :]
        inside = (unit < n)[:, None] & (column < k)[None, :]
        w = tl.load(w_ptr + place, mask=inside, other=0.0)
        dx = tl.dot(dz, w.to(dz.dtype), dx, input_precision=PRECISION)
        gradient = tl.dot(tl.trans(dz), h, input_precision=PRECISION)
        first = first_ptr
        second = second_ptr
        if first_ptr is not None:
            first = first_ptr + place
        if second_ptr is not None:
            second = second_ptr + place
        w = updated(w, gradient, first, second, inside, table_ptr, index, OPTIMIZER)
        tl.store(w_ptr + place, w, mask=inside)
        if bias_ptr is not None:  # noqa: SIM102
            if (start // BLOCK_N) % tl.num_programs(0) == tl.program_id(0):
                bias_gradient = tl.sum(dz.to(tl.float32), axis=0)
                update_bias(
                    bias_gradient, unit, n, bias_ptr, bias_first_ptr, bias_second_ptr, table_ptr, index, OPTIMIZER
                )  # fmt: skip
    if DROPOUT:
        run_step = tl.load(control_ptr + 1) + step
        first_unit = tl.program_id(0) * BLOCK_K
        keep = run_keep(seed, run_step, layer, row, first_unit, threshold, BLOCK_M, BLOCK_K)
        dx = tl.where(keep, dx * keep_scale, 0.0)
    if FROM_Z:
        saved = tl.load(z_ptr + element, mask=own, other=0.0)
    else:
        saved = h
    dx *= slope(saved, inverse_scale, ACTIVATION, FROM_Z)
    tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=own)


def weight_update(
    dz: torch.Tensor, x: Rows, weights: Weights, sums: torch.Tensor | None, clock: Clock, *, optimizer: str, tile: Tile,
    tf32: bool, loss_parts: torch.Tensor | None = None, losses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One optimizer step for a Linear, given dz `[batch, n]`; `tile` is (n, k, batch). `sums` as the kernel says; the last
    update of a step gets the parts of the loss, too, and where its sum goes."""
    batch, n = dz.shape
    k = weights.weight.shape[1]
    grid = (cdiv(n, tile.m) * cdiv(k, tile.n),)
    source: Any = x.values
    gradient: Any = dz
    if tile.tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        gradient = TensorDescriptor(dz, list(dz.shape), list(dz.stride()), [tile.k, tile.m])
        source = TensorDescriptor(x.values, list(x.values.shape), list(x.values.stride()), [tile.k, tile.n])
    tensors = (
        gradient, source, x.order, weights.weight, weights.copy, weights.weight_first, weights.weight_second,
        weights.bias, weights.bias_first, weights.bias_second, sums, loss_parts, losses, clock.control, clock.table,
    )  # fmt: skip
    sizes = (batch, n, k, 0 if sums is None else len(sums), 0 if loss_parts is None else len(loss_parts))
    constants = (tile.m, tile.n, tile.k, 8, optimizer, "tf32" if tf32 else "ieee", tile.tma)
    run = launch_with_descriptors if tile.tma else launch
    run(
        weight_update_kernel, grid, tensors, (clock.step,), sizes, constants, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def backward_strip(
    dz: torch.Tensor, h: torch.Tensor, z: torch.Tensor | None, dx: torch.Tensor, weights: Weights, before: Ending,
    clock: Clock, *, optimizer: str, tile: Tile, tf32: bool,
) -> None:  # fmt: skip
    """dx and the optimizer step of one Linear in one pass over W; `before` is the ending of the stage that made h."""
    batch, n = dz.shape
    k = weights.weight.shape[1]
    seed, threshold, layer, scale = before.dropout_values
    launch(
        strip_kernel,
        (cdiv(k, tile.n),),
        (
            dz, h, z, dx, weights.weight, weights.weight_first, weights.weight_second, weights.bias,
            weights.bias_first, weights.bias_second, clock.control, clock.table,
        ),
        (seed, clock.step, threshold, layer, scale, 1 - before.p),
        (batch, n, k),
        (
            tile.m, tile.k, tile.n, before.activation, before.from_z, before.p > 0, optimizer,
            "tf32" if tf32 else "ieee",
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
