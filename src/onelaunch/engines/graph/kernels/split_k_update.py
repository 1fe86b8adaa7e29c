"""The optimizer's step of a split-K weight gradient: it adds up the partial sums that several programs have stored.

tests/engines/graph/test_parity.py covers it, with the shapes "large" and "narrow".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_bias, update_in_place, update_scalars
from onelaunch.engines.graph.kernels.run_arguments import Clock, Weights
from onelaunch.engines.graph.kernels.run_state import EPOCH_STEP, launch_step, sum_loss
from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel

WEIGHTS_PER_PROGRAM = 32  # one 128-byte line of memory per partial sum


@triton.jit
def column_sums(sums_ptr, column, inside, parts, n, PARTS: tl.constexpr):
    """The sum over `parts` rows of n numbers, for these columns: many loads in flight, always the same order of addition."""
    total = tl.zeros((PARTS, column.shape[0]), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        total += tl.load(
            sums_ptr + part.to(tl.int64)[:, None] * n + column[None, :],
            mask=(part < parts)[:, None] & inside[None, :],
            other=0.0,
        )
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["step"])
def split_k_update_kernel(
    parts_ptr,
    w_ptr,
    copy_ptr,
    first_ptr,
    second_ptr,
    sums_ptr,
    bias_ptr,
    bias_first_ptr,
    bias_second_ptr,
    loss_parts_ptr,
    losses_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    total,
    units,
    parts,
    sums,
    loss_parts,
    BLOCK: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`parts_ptr` holds `parts` rows of `total` weight gradients, `sums_ptr` `sums` rows of `units` bias gradients.

    The last program updates the bias and adds up the loss.
    """
    wait_for_previous_kernel(OVERLAP)
    index = tl.load(control_ptr + EPOCH_STEP) + step
    scalars = update_scalars(table_ptr, index)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < total
    gradient = column_sums(parts_ptr, offset, inside, parts, total, PARTS)
    allow_next_kernel(OVERLAP)
    w = tl.load(w_ptr + offset, mask=inside, other=0.0)
    update_in_place(w, gradient, offset, inside, w_ptr, copy_ptr, first_ptr, second_ptr, scalars, OPTIMIZER)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if bias_ptr is not None:
            unit = tl.arange(0, UNITS)
            bias_gradient = column_sums(sums_ptr, unit, unit < units, sums, units, 32)
            update_bias(bias_gradient, unit, units, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)
        if losses_ptr is not None:
            sum_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts)


def split_k_update(
    parts: torch.Tensor, sums: torch.Tensor | None, weights: Weights, clock: Clock, *, optimizer: str,
    loss_parts: torch.Tensor | None = None, losses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One optimizer step for `weights`. `parts` `[p, weights]` and, where there is a bias, `sums` `[q, units]` are partial sums
    of the gradients. With `losses`, also adds up the step's loss from `loss_parts`."""
    total = weights.weight.numel()
    units = 1 if weights.bias is None else weights.bias.numel()
    launch_step(
        clock,
        split_k_update_kernel,
        (ceil_div(total, WEIGHTS_PER_PROGRAM),),
        (
            parts, weights.weight, weights.copy, weights.weight_first, weights.weight_second, sums, weights.bias,
            weights.bias_first, weights.bias_second, loss_parts, losses, clock.control, clock.table,
        ),
        (clock.step,),
        (
            total, units, len(parts), 0 if sums is None else len(sums), 0 if loss_parts is None else len(loss_parts),
        ),
        (WEIGHTS_PER_PROGRAM, next_power_of_2(units), min(64, next_power_of_2(len(parts))), optimizer),
    )  # fmt: skip
