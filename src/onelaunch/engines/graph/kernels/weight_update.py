"""The gradient of a Linear's weights with the optimizer in the GEMM's epilogue: dW stays in registers and is consumed there.

Each program owns a tile of W and loops over the batch. Where W has too few tiles to fill the chip (few outputs, many rows),
the batch is split too (split-K): programs store partial sums, and `split_k_update` takes the optimizer's step.
tests/engines/graph/test_parity.py covers both, with the shape "large".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_bias, update_in_place, update_scalars
from onelaunch.engines.graph.kernels.run_arguments import Clock, Rows, Weights
from onelaunch.engines.graph.kernels.run_state import EPOCH_STEP, as_features, gathered_rows, launch_step, sum_loss
from onelaunch.engines.graph.kernels.split_k_update import column_sums
from onelaunch.integers import ceil_div
from onelaunch.kernels.dependent_launch import wait_for_previous_kernel
from onelaunch.kernels.gemm_tile import GemmTile
from onelaunch.kernels.linear import tile_of

BAND = 8


@triton.jit
def weight_gradient(
    dz_ptr,
    x_ptr,
    order_ptr,
    table_ptr,
    index,
    tile_n,
    tile_k,
    first_row,
    end_row,
    batch,
    n,
    k,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """(dzᵀ·x over rows `[first_row, end_row)` for one tile of W; the sums of dz over these rows if BIAS).

    `first_row` is a multiple of BLOCK_M, and so is `end_row` unless it is the batch.
    """
    unit = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    gradient = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    bias_gradient = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(first_row, end_row, BLOCK_M):
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
                x = as_features(x, dz.dtype)
        gradient = tl.dot(tl.trans(dz), x, gradient, input_precision=PRECISION)
        if BIAS:
            bias_gradient += tl.sum(dz.to(tl.float32), axis=0)
    return gradient, bias_gradient


@triton.jit(do_not_specialize=["step"])
def partial_products_kernel(
    dz_ptr,
    x_ptr,
    order_ptr,
    parts_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    batch,
    n,
    k,
    rows,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """parts[p], `[n, k]`, = dzᵀ·x over rows `[p * rows, (p + 1) * rows)`."""
    wait_for_previous_kernel(OVERLAP)
    tiles = tl.cdiv(n, BLOCK_N) * tl.cdiv(k, BLOCK_K)
    part = tl.program_id(0) // tiles
    tile_n, tile_k = tile_of(tl.program_id(0) % tiles, n, k, BLOCK_N, BLOCK_K, BAND)
    end = tl.minimum((part + 1) * rows, batch)
    gradient, _ = weight_gradient(
        dz_ptr, x_ptr, order_ptr, table_ptr, tl.load(control_ptr + EPOCH_STEP) + step, tile_n, tile_k, part * rows, end,
        batch, n, k, BLOCK_N, BLOCK_K, BLOCK_M, False, PRECISION, TMA,
    )  # fmt: skip
    unit = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offset = (part * n + unit).to(tl.int64)[:, None] * k + column[None, :]
    tl.store(parts_ptr + offset, gradient, mask=(unit < n)[:, None] & (column < k)[None, :])


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
    WEIGHTS_FIRST: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """W -= lr * dzᵀ·x over one tile of W. `sums`, where given, holds `parts` rows whose sum is the bias gradient.

    The last of a step's kernels also adds up the step's loss.
    """
    wait_for_previous_kernel(OVERLAP)
    index = tl.load(control_ptr + EPOCH_STEP) + step
    scalars = update_scalars(table_ptr, index)
    tile = tl.program_id(0)
    tile_n, tile_k = tile_of(tile, n, k, BLOCK_N, BLOCK_K, BAND)
    unit = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offset = unit.to(tl.int64)[:, None] * k + column[None, :]
    inside = (unit < n)[:, None] & (column < k)[None, :]
    if WEIGHTS_FIRST:  # a small batch's product takes less time than loading the weights: start that first
        w = tl.load(w_ptr + offset, mask=inside, other=0.0)
    gradient, bias_gradient = weight_gradient(
        dz_ptr, x_ptr, order_ptr, table_ptr, index, tile_n, tile_k, 0, batch, batch, n, k,
        BLOCK_N, BLOCK_K, BLOCK_M, sums_ptr is None and bias_ptr is not None, PRECISION, TMA,
    )  # fmt: skip
    if not WEIGHTS_FIRST:
        w = tl.load(w_ptr + offset, mask=inside, other=0.0)
    update_in_place(w, gradient, offset, inside, w_ptr, copy_ptr, first_ptr, second_ptr, scalars, OPTIMIZER)
    if bias_ptr is not None:  # noqa: SIM102 (known when compiling, unlike the tile)
        if tile_k == 0:
            if sums_ptr is not None:
                bias_gradient = column_sums(sums_ptr, unit, unit < n, parts, n, 32)
            update_bias(bias_gradient, unit, n, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)
    if losses_ptr is not None:  # noqa: SIM102
        if tile == 0:
            sum_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts)


def weight_update(
    dz: torch.Tensor, x: Rows, weights: Weights, sums: torch.Tensor | None, clock: Clock, *, optimizer: str, tile: GemmTile,
    tf32: bool, loss_parts: torch.Tensor | None = None, losses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One optimizer step for a Linear, given dz `[batch, n]`; `tile` is (n, k, batch).

    `sums` as in the kernel. The last update of a step also gets the partial sums of the loss and where to store the total.
    """
    batch, n = dz.shape
    k = weights.weight.shape[1]
    grid = (ceil_div(n, tile.m) * ceil_div(k, tile.n),)
    gradient, source = _operands(dz, x, tile)
    tensors = (
        gradient, source, x.order, weights.weight, weights.copy, *weights.states_and_bias, sums, loss_parts, losses,
        clock.control, clock.table,
    )  # fmt: skip
    sizes = (batch, n, k, 0 if sums is None else len(sums), 0 if loss_parts is None else len(loss_parts))
    weights_first = batch <= tile.k  # one product of the whole batch
    constants = (tile.m, tile.n, tile.k, BAND, optimizer, "tf32" if tf32 else "ieee", weights_first, tile.tma)
    launch_step(
        clock,
        weight_update_kernel, grid, tensors, (clock.step,), sizes, constants, num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def partial_products(
    dz: torch.Tensor, x: Rows, parts: torch.Tensor, clock: Clock, *, tile: GemmTile, tf32: bool
) -> None:
    """Fills parts `[splits, n * k]`, whose sum is the weight gradient; `tile` is (n, k, batch)."""
    batch, n = dz.shape
    k = parts.shape[1] // n
    rows = ceil_div(ceil_div(batch, len(parts)), tile.k) * tile.k
    gradient, source = _operands(dz, x, tile)
    launch_step(
        clock,
        partial_products_kernel,
        (ceil_div(n, tile.m) * ceil_div(k, tile.n) * len(parts),),
        (gradient, source, x.order, parts, clock.control, clock.table),
        (clock.step,),
        (batch, n, k, rows),
        (tile.m, tile.n, tile.k, BAND, "tf32" if tf32 else "ieee", tile.tma),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _operands(dz: torch.Tensor, x: Rows, tile: GemmTile) -> tuple[Any, Any]:
    """dz and x as the kernels take them: tensors, or TMA descriptors of their tiles."""
    if not tile.tma:
        return dz, x.values
    from triton.tools.tensor_descriptor import TensorDescriptor

    return (
        TensorDescriptor(dz, list(dz.shape), list(dz.stride()), [tile.k, tile.m]),
        TensorDescriptor(x.values, list(x.values.shape), list(x.values.stride()), [tile.k, tile.n]),
    )
