"""The optimizer's step from gradients that several programs have summed, each for its rows; and what all updates share."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_scalars, updated
from onelaunch.engines.graph.kernels.run_arguments import Clock, Weights
from onelaunch.engines.graph.kernels.run_state import add_up_loss, launch_step
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.launch import cdiv, next_power_of_2

PARTS_UPDATE_BLOCK = 32  # weights a program: one line of memory a part


@triton.jit
def update_in_place(
    w, gradient, place, inside, w_ptr, copy_ptr, first_ptr, second_ptr, scalars, OPTIMIZER: tl.constexpr
):  # fmt: skip
    w = updated(w, gradient, first_ptr, second_ptr, place, inside, scalars, OPTIMIZER)
    tl.store(w_ptr + place, w, mask=inside)
    if copy_ptr is not None:
        tl.store(copy_ptr + place, w.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit
def update_bias(
    gradient, unit, n, bias_ptr, first_ptr, second_ptr, scalars, OPTIMIZER: tl.constexpr
):  # fmt: skip
    bias = tl.load(bias_ptr + unit, mask=unit < n, other=0.0)
    update_in_place(bias, gradient, unit, unit < n, bias_ptr, None, first_ptr, second_ptr, scalars, OPTIMIZER)


@triton.jit
def column_sums(sums_ptr, column, inside, parts, n, PARTS: tl.constexpr):
    """The sum of `parts` rows of n numbers, over these columns: many loads at once, one order always."""
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
def parts_update_kernel(
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
    """The optimizer's step where several programs have left their sums: `parts` rows of `total` weight gradients, and `sums`
    rows of `units` bias gradients, which the last program adds up."""
    wait_for_previous_kernel(OVERLAP)
    index = tl.load(control_ptr) + step
    scalars = update_scalars(table_ptr, index)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    gradient = column_sums(parts_ptr, place, inside, parts, total, PARTS)
    allow_next_kernel(OVERLAP)
    w = tl.load(w_ptr + place, mask=inside, other=0.0)
    update_in_place(w, gradient, place, inside, w_ptr, copy_ptr, first_ptr, second_ptr, scalars, OPTIMIZER)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if bias_ptr is not None:
            unit = tl.arange(0, UNITS)
            bias_gradient = column_sums(sums_ptr, unit, unit < units, sums, units, 32)
            update_bias(bias_gradient, unit, units, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)
        if losses_ptr is not None:
            add_up_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts)


def parts_update(
    parts: torch.Tensor, sums: torch.Tensor | None, weights: Weights, clock: Clock, *, optimizer: str,
    loss_parts: torch.Tensor | None = None, losses: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One optimizer step for `weights`, from rows of `parts`, all weights each, and, where there is a bias, of `sums`; adds up
    the step's loss where that is given."""
    total = weights.weight.numel()
    units = 1 if weights.bias is None else weights.bias.numel()
    launch_step(
        clock,
        parts_update_kernel,
        (cdiv(total, PARTS_UPDATE_BLOCK),),
        (
            parts, weights.weight, weights.copy, weights.weight_first, weights.weight_second, sums, weights.bias,
            weights.bias_first, weights.bias_second, loss_parts, losses, clock.control, clock.table,
        ),
        (clock.step,),
        (
            total, units, len(parts), 0 if sums is None else len(sums), 0 if loss_parts is None else len(loss_parts),
        ),
        (PARTS_UPDATE_BLOCK, next_power_of_2(units), min(64, next_power_of_2(len(parts))), optimizer),
    )  # fmt: skip
