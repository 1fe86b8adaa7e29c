"""The whole backward pass of a Linear for a small batch in one pass over its weights: input and weight gradient, and update.

For a small batch, the time goes into reading and writing W. A program owns a strip of columns: each tile of W contributes to
dx and is updated, which is one read and one write instead of two reads and one write. To have enough reads in flight, several
programs share a strip, each with a part of the rows of W. The last of them to finish adds up their partial sums of dx, always
in the same order.

With TMA, the tensor memory accelerator loads and stores the tiles: it swizzles them in shared memory, where W is read in two
layouts, for the product and for the update. Plain copies would have bank conflicts in both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_bias, update_scalars, updated
from onelaunch.engines.graph.kernels.run_arguments import Clock, Epilogue, Weights
from onelaunch.engines.graph.kernels.run_state import EPOCH_STEP, RUN_STEP, derivative, dropout_keep, launch_step
from onelaunch.engines.graph.kernels.split_weights import join_words, split_words
from onelaunch.integers import ceil_div
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.gemm_tile import GemmTile


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def fused_backward_kernel(
    dz_ptr,
    h_ptr,
    z_ptr,
    dx_ptr,
    partial_dx_ptr,
    tickets_ptr,
    w_ptr,
    low_ptr,
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
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_Z: tl.constexpr,
    DROPOUT: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """For BLOCK_K columns of W: dx = (dz·W) times the derivative of the previous stage, and the step with dW = dzᵀ·h."""
    scalars = update_scalars(table_ptr, tl.load(control_ptr + EPOCH_STEP, cache_modifier=".cg") + step)
    strip = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    strips = tl.num_programs(0) // SPLITS
    rows_per_split = tl.cdiv(tl.cdiv(n, BLOCK_N), SPLITS) * BLOCK_N
    column = strip * BLOCK_K + tl.arange(0, BLOCK_K)
    row = tl.arange(0, BLOCK_M)
    own = (row < batch)[:, None] & (column < k)[None, :]
    element = row[:, None] * k + column[None, :]
    h = tl.load(h_ptr + element, mask=own, other=0.0, cache_modifier=".cg")
    wait_for_previous_kernel(OVERLAP)  # only dz comes from it
    dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    # With its own STAGES, a loop also pipelines loads that feed no product: those of the low words.
    for start in tl.range(
        split * rows_per_split, tl.minimum((split + 1) * rows_per_split, n), BLOCK_N, num_stages=STAGES
    ):
        unit = start + tl.arange(0, BLOCK_N)
        offset = unit.to(tl.int64)[:, None] * k + column[None, :]
        inside = (unit < n)[:, None] & (column < k)[None, :]
        if TMA:
            dz = dz_ptr.load([0, start])
            w = w_ptr.load([start, strip * BLOCK_K])
            low = None if low_ptr is None else low_ptr.load([start, strip * BLOCK_K])
        else:
            dz = tl.load(
                dz_ptr + row[:, None] * n + unit[None, :], mask=(row < batch)[:, None] & (unit < n)[None, :], other=0.0
            )
            w = tl.load(w_ptr + offset, mask=inside, other=0.0)
            low = None
        dx = tl.dot(dz, w.to(dz.dtype), dx, input_precision=PRECISION)
        gradient = tl.dot(tl.trans(dz), h, input_precision=PRECISION)
        w = updated(join_words(w, low), gradient, first_ptr, second_ptr, offset, inside, scalars, OPTIMIZER)
        if OPTIMIZER != "store_gradient":
            if not TMA:
                tl.store(w_ptr + offset, w, mask=inside)
            elif low_ptr is None:
                w_ptr.store([start, strip * BLOCK_K], w)
            else:
                high, low = split_words(w)
                w_ptr.store([start, strip * BLOCK_K], high)
                low_ptr.store([start, strip * BLOCK_K], low)
        if bias_ptr is not None:  # noqa: SIM102
            if (start // BLOCK_N) % strips == strip:
                bias_gradient = tl.sum(dz.to(tl.float32), axis=0)
                update_bias(bias_gradient, unit, n, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)
    allow_next_kernel(OVERLAP)
    last = True
    if SPLITS > 1:
        size = batch * k
        tl.store(partial_dx_ptr + split * size + element, dx, mask=own)
        tl.debug_barrier()  # all threads have stored their part of dx before one thread takes the ticket
        last = tl.atomic_add(tickets_ptr + strip, 1, sem="acq_rel") % SPLITS == SPLITS - 1
    if last:
        if SPLITS > 1:
            dx = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
            for one in tl.static_range(SPLITS):
                dx += tl.load(partial_dx_ptr + one * size + element, mask=own, other=0.0, cache_modifier=".cg")
        if DROPOUT:
            run_step = tl.load(control_ptr + RUN_STEP) + step
            first_unit = strip * BLOCK_K
            keep = dropout_keep(seed, run_step, layer, row, first_unit, threshold, BLOCK_M, BLOCK_K)
            dx = tl.where(keep, dx * keep_scale, 0.0)
        if FROM_Z:
            saved = tl.load(z_ptr + element, mask=own, other=0.0)
        else:
            saved = h
        dx *= derivative(saved, inverse_scale, ACTIVATION, FROM_Z)
        tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=own)


def fused_backward(
    dz: torch.Tensor, h: torch.Tensor, z: torch.Tensor | None, dx: torch.Tensor, partial_dx: torch.Tensor | None,
    tickets: torch.Tensor | None, weights: Weights, before: Epilogue, clock: Clock, *, optimizer: str, tile: GemmTile,
    tf32: bool,
) -> None:  # fmt: skip
    """Fills dx `[batch, k]` and takes the optimizer step of one Linear; `before` is the epilogue of the stage that made h.

    `tile` is (batch, columns, units per iteration). Where it splits, `partial_dx` `[splits, batch, k]` is fp32 scratch, and
    `tickets` is int64, one counter per strip: zero before the first call, then only incremented, never reset.
    """
    assert weights.low is None or tile.tma
    batch, n = dz.shape
    k = weights.weight.shape[1]
    seed, threshold, layer, scale = before.dropout_values
    gradient, weight, low = _tiles(dz, weights, tile) if tile.tma else (dz, weights.weight, weights.low)
    launch_step(
        clock,
        fused_backward_kernel,
        (ceil_div(k, tile.n) * tile.splits,),
        (
            gradient, h, z, dx, partial_dx, tickets, weight, low, *weights.states_and_bias, clock.control, clock.table,
        ),
        (seed, clock.step, threshold, layer, scale, 1 - before.p),
        (batch, n, k),
        (
            tile.m, tile.k, tile.n, tile.splits, before.activation, before.saves_input, before.p > 0, optimizer,
            "tf32" if tf32 else "ieee", None if low is None else tile.stages, tile.tma,
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip


def _tiles(dz: torch.Tensor, weights: Weights, tile: GemmTile) -> tuple[Any, Any, Any]:
    """TMA descriptors of the tiles of dz, of the weights or their high words, and of the low words if there are any."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    def tiles(tensor: torch.Tensor, shape: list[int]) -> TensorDescriptor:
        return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), shape)

    low = None if weights.low is None else tiles(weights.low, [tile.k, tile.n])
    return tiles(dz, [tile.m, tile.k]), tiles(weights.weight, [tile.k, tile.n]), low
