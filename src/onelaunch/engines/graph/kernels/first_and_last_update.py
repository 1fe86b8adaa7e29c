"""The last launch of a small batch's step: the update of the first and the last Linear, and the sum of the loss.

`fused_backward` updates the Linears between them. The first Linear needs no input gradient, and the last one's was computed by
`output_layer_small_batch`, so neither is worth a launch of its own.
tests/engines/graph/test_parity.py covers it, with the shape "small".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_bias, update_scalars, updated
from onelaunch.engines.graph.kernels.run_arguments import Clock, Weights
from onelaunch.engines.graph.kernels.run_state import EPOCH_STEP, launch_step, sum_loss
from onelaunch.engines.graph.kernels.split_weights import join_words, load_low, store_weights
from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.gemm_tile import GemmTile


@triton.jit
def update_tile(
    tile, dz_ptr, x_ptr, w_ptr, low_ptr, first_ptr, second_ptr, bias_ptr, bias_first_ptr, bias_second_ptr, scalars,
    batch, n, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, OPTIMIZER: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The optimizer's step for one tile of W with the gradient dzᵀ·x of a batch of at most BLOCK_M rows."""
    tiles_k = tl.cdiv(k, BLOCK_K)
    unit = tile // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offset = unit.to(tl.int64)[:, None] * k + column[None, :]
    inside = (unit < n)[:, None] & (column < k)[None, :]
    # The product takes less time than loading the weights, so that the loads start first.
    w = tl.load(w_ptr + offset, mask=inside, other=0.0, cache_modifier=".cg")
    low = load_low(low_ptr, offset, inside)
    row = tl.arange(0, BLOCK_M)
    rows = (row < batch)[:, None]
    x_inside = rows & (column < k)[None, :]
    x = tl.load(x_ptr + row[:, None] * k + column[None, :], mask=x_inside, other=0.0, cache_modifier=".cg")
    wait_for_previous_kernel(OVERLAP)  # only dz comes from it
    dz = tl.load(dz_ptr + row[:, None] * n + unit[None, :], mask=rows & (unit < n)[None, :], other=0.0)
    gradient = tl.dot(tl.trans(dz), x, input_precision=PRECISION)
    w = updated(join_words(w, low), gradient, first_ptr, second_ptr, offset, inside, scalars, OPTIMIZER)
    if OPTIMIZER != "store_gradient":
        store_weights(w, w_ptr, low_ptr, offset, inside)
    if bias_ptr is not None:  # noqa: SIM102 (known when compiling, unlike the tile)
        if tile % tiles_k == 0:
            sums = tl.sum(dz.to(tl.float32), axis=0)
            update_bias(sums, unit, n, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)


@triton.jit(do_not_specialize=["step"])
def first_and_last_update_kernel(
    dz_ptr,
    x_ptr,
    w_ptr,
    low_ptr,
    first_ptr,
    second_ptr,
    bias_ptr,
    bias_first_ptr,
    bias_second_ptr,
    last_dz_ptr,
    last_x_ptr,
    last_w_ptr,
    last_low_ptr,
    last_first_ptr,
    last_second_ptr,
    last_bias_ptr,
    last_bias_first_ptr,
    last_bias_second_ptr,
    loss_parts_ptr,
    losses_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    batch,
    n,
    k,
    last_n,
    last_k,
    loss_parts,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LAST_N: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first programs update the first Linear, the next ones the last Linear, and the last program adds up the loss."""
    index = tl.load(control_ptr + EPOCH_STEP, cache_modifier=".cg") + step
    scalars = update_scalars(table_ptr, index)
    tiles = tl.cdiv(n, BLOCK_N) * tl.cdiv(k, BLOCK_K)
    program = tl.program_id(0)
    if program < tiles:
        update_tile(
            program, dz_ptr, x_ptr, w_ptr, low_ptr, first_ptr, second_ptr, bias_ptr, bias_first_ptr, bias_second_ptr,
            scalars, batch, n, k, BLOCK_N, BLOCK_K, BLOCK_M, OPTIMIZER, PRECISION, OVERLAP,
        )  # fmt: skip
    elif program < tl.num_programs(0) - 1:
        update_tile(
            program - tiles, last_dz_ptr, last_x_ptr, last_w_ptr, last_low_ptr, last_first_ptr, last_second_ptr,
            last_bias_ptr, last_bias_first_ptr, last_bias_second_ptr, scalars, batch, last_n, last_k, LAST_N, BLOCK_K,
            BLOCK_M, OPTIMIZER, PRECISION, OVERLAP,
        )  # fmt: skip
    else:
        wait_for_previous_kernel(OVERLAP)
        sum_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts)
    allow_next_kernel(OVERLAP)


def first_and_last_update(
    dz: torch.Tensor, x: torch.Tensor, weights: Weights, last_dz: torch.Tensor, last_x: torch.Tensor,
    last_weights: Weights, loss_parts: torch.Tensor, losses: torch.Tensor, clock: Clock, *, optimizer: str, tile: GemmTile,
    tf32: bool,
) -> None:  # fmt: skip
    """The optimizer step of the first and the last Linear for a batch of at most `tile.k` rows; `tile` is (n, k, batch)."""
    batch, n = dz.shape
    k, last_n, last_k = x.shape[1], last_dz.shape[1], last_x.shape[1]
    last_tile = min(tile.m, max(16, next_power_of_2(last_n)))
    programs = ceil_div(n, tile.m) * ceil_div(k, tile.n) + ceil_div(last_n, last_tile) * ceil_div(last_k, tile.n) + 1
    launch_step(
        clock,
        first_and_last_update_kernel,
        (programs,),
        (
            dz, x, weights.weight, weights.low, *weights.states_and_bias, last_dz, last_x, last_weights.weight,
            last_weights.low, *last_weights.states_and_bias, loss_parts, losses, clock.control, clock.table,
        ),
        (clock.step,),
        (batch, n, k, last_n, last_k, len(loss_parts)),
        (tile.m, tile.n, tile.k, last_tile, optimizer, "tf32" if tf32 else "ieee"),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
