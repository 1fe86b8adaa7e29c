"""The last launch of a small batch's step: the first and the last Linear's update, and the sum of the loss.

The Linears between them are updated by `backward_strip`. The first needs no input gradient, the last has got its own from
`output_row`; neither is worth a launch of its own.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_scalars, updated
from onelaunch.engines.graph.kernels.run_arguments import Clock, Tile, Weights
from onelaunch.engines.graph.kernels.run_state import add_up_loss, launch_step
from onelaunch.engines.graph.kernels.split_k_update import update_bias
from onelaunch.engines.graph.kernels.split_weights import joined, load_low, store_weights
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.launch import cdiv, next_power_of_2


@triton.jit
def small_update(
    tile, dz_ptr, x_ptr, w_ptr, low_ptr, first_ptr, second_ptr, bias_ptr, bias_first_ptr, bias_second_ptr, scalars,
    batch, n, k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, OPTIMIZER: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """W -= lr * dzᵀ·x over one tile of W, for a batch of at most BLOCK_M rows."""
    tiles_k = tl.cdiv(k, BLOCK_K)
    unit = tile // tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tile % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    place = unit.to(tl.int64)[:, None] * k + column[None, :]
    inside = (unit < n)[:, None] & (column < k)[None, :]
    # The product is over before the weights arrive: ask for them first.
    w = tl.load(w_ptr + place, mask=inside, other=0.0, cache_modifier=".cg")
    low = load_low(low_ptr, place, inside)
    row = tl.arange(0, BLOCK_M)
    rows = (row < batch)[:, None]
    x_inside = rows & (column < k)[None, :]
    x = tl.load(x_ptr + row[:, None] * k + column[None, :], mask=x_inside, other=0.0, cache_modifier=".cg")
    wait_for_previous_kernel(OVERLAP)  # for dz alone
    dz = tl.load(dz_ptr + row[:, None] * n + unit[None, :], mask=rows & (unit < n)[None, :], other=0.0)
    gradient = tl.dot(tl.trans(dz), x, input_precision=PRECISION)
    w = updated(joined(w, low), gradient, first_ptr, second_ptr, place, inside, scalars, OPTIMIZER)
    store_weights(w, w_ptr, low_ptr, place, inside)
    if bias_ptr is not None:  # noqa: SIM102 (known when compiling, unlike the tile)
        if tile % tiles_k == 0:
            sums = tl.sum(dz.to(tl.float32), axis=0)
            update_bias(sums, unit, n, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)


@triton.jit(do_not_specialize=["step"])
def ends_update_kernel(
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
    """A small batch's last launch: the first Linear's update, the last one's, and the sum of the step's loss."""
    index = tl.load(control_ptr, cache_modifier=".cg") + step
    scalars = update_scalars(table_ptr, index)
    tiles = tl.cdiv(n, BLOCK_N) * tl.cdiv(k, BLOCK_K)
    program = tl.program_id(0)
    if program < tiles:
        small_update(
            program, dz_ptr, x_ptr, w_ptr, low_ptr, first_ptr, second_ptr, bias_ptr, bias_first_ptr, bias_second_ptr,
            scalars, batch, n, k, BLOCK_N, BLOCK_K, BLOCK_M, OPTIMIZER, PRECISION, OVERLAP,
        )  # fmt: skip
    elif program < tl.num_programs(0) - 1:
        small_update(
            program - tiles, last_dz_ptr, last_x_ptr, last_w_ptr, last_low_ptr, last_first_ptr, last_second_ptr,
            last_bias_ptr, last_bias_first_ptr, last_bias_second_ptr, scalars, batch, last_n, last_k, LAST_N, BLOCK_K,
            BLOCK_M, OPTIMIZER, PRECISION, OVERLAP,
        )  # fmt: skip
    else:
        wait_for_previous_kernel(OVERLAP)
        add_up_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts)
    allow_next_kernel(OVERLAP)


def ends_update(
    dz: torch.Tensor, x: torch.Tensor, weights: Weights, last_dz: torch.Tensor, last_x: torch.Tensor,
    last_weights: Weights, loss_parts: torch.Tensor, losses: torch.Tensor, clock: Clock, *, optimizer: str, tile: Tile,
    tf32: bool,
) -> None:  # fmt: skip
    """The first and the last Linear's optimizer step for a batch of at most `tile.k` rows; `tile` is (n, k, batch)."""
    batch, n = dz.shape
    k, last_n, last_k = x.shape[1], last_dz.shape[1], last_x.shape[1]
    last_tile = min(tile.m, max(16, next_power_of_2(last_n)))
    programs = cdiv(n, tile.m) * cdiv(k, tile.n) + cdiv(last_n, last_tile) * cdiv(last_k, tile.n) + 1
    launch_step(
        clock,
        ends_update_kernel,
        (programs,),
        (
            dz, x, weights.weight, weights.low, weights.weight_first, weights.weight_second, weights.bias,
            weights.bias_first, weights.bias_second, last_dz, last_x, last_weights.weight, last_weights.low,
            last_weights.weight_first, last_weights.weight_second, last_weights.bias, last_weights.bias_first,
            last_weights.bias_second, loss_parts, losses, clock.control, clock.table,
        ),
        (clock.step,),
        (batch, n, k, last_n, last_k, len(loss_parts)),
        (tile.m, tile.n, tile.k, last_tile, optimizer, "tf32" if tf32 else "ieee"),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
