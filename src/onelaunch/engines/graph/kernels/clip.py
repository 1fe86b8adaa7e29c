"""Clipping by the global norm: the factor min(1, clip_norm / (norm + 1e-6)), as `clip_grad_norm_` has it, then the update.

With clipping, the kernels that compute weight gradients store them in one vector instead of taking the optimizer's step
("store_gradient" in optimizer.py). They are gradients of the batch's summed loss, so that the norm is multiplied by the row
weight. The sums of squares are added in a fixed order. Each parameter costs
4 bytes more written, and 8 to 12 read.
tests/engines/graph/test_clipping.py compares steps of every shape with a loop in float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_bias, update_in_place, update_scalars
from onelaunch.engines.graph.kernels.run_arguments import SQUARES_PER_PROGRAM, Clock, Weights
from onelaunch.engines.graph.kernels.run_state import CLIP_NORM, EPOCH_STEP, ROW_WEIGHT, hyper, launch_step, scalar
from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dependent_launch import wait_for_previous_kernel

WEIGHTS_PER_PROGRAM = 1024


@triton.jit(do_not_specialize=["step"])
def clip_factor_kernel(
    gradients_ptr,
    squares_ptr,
    tickets_ptr,
    factor_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    count,
    programs,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program stores the sum of its squares; the last one to finish adds them up and stores the factor."""
    wait_for_previous_kernel(OVERLAP)
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(program.to(tl.int64) * BLOCK, count, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        gradient = tl.load(gradients_ptr + at, mask=at < count, other=0.0)
        total += gradient * gradient
    tl.store(squares_ptr + program, tl.sum(total, axis=0))
    tl.debug_barrier()  # the sum is stored before a thread takes the ticket
    last = tl.atomic_add(tickets_ptr, 1, sem="acq_rel") % programs == programs - 1
    if last:
        part = tl.arange(0, PROGRAMS)
        squares = tl.load(squares_ptr + part, mask=part < programs, other=0.0, cache_modifier=".cg")
        index = tl.load(control_ptr + EPOCH_STEP) + step
        norm = tl.sqrt(tl.sum(squares, axis=0)) * scalar(table_ptr, index, ROW_WEIGHT)
        ratio = hyper(table_ptr, CLIP_NORM) / (norm + 1e-6)
        tl.store(factor_ptr, tl.where(ratio >= 1, 1.0, ratio))  # NaN stays NaN


@triton.jit(do_not_specialize=["step"])
def clipped_update_kernel(
    factor_ptr,
    gradient_ptr,
    w_ptr,
    copy_ptr,
    first_ptr,
    second_ptr,
    bias_gradient_ptr,
    bias_ptr,
    bias_first_ptr,
    bias_second_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    total,
    units,
    BLOCK: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first programs update the weights, the others the bias; either may be missing."""
    wait_for_previous_kernel(OVERLAP)
    scalars = update_scalars(table_ptr, tl.load(control_ptr + EPOCH_STEP) + step)
    factor = tl.load(factor_ptr, cache_modifier=".cg")
    program = tl.program_id(0)
    weight_programs = tl.cdiv(total, BLOCK)
    if program < weight_programs:
        if w_ptr is not None:
            offset = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = offset < total
            gradient = factor * tl.load(gradient_ptr + offset, mask=inside, other=0.0)
            w = tl.load(w_ptr + offset, mask=inside, other=0.0)
            update_in_place(w, gradient, offset, inside, w_ptr, copy_ptr, first_ptr, second_ptr, scalars, OPTIMIZER)
    elif bias_ptr is not None:
        unit = (program - weight_programs) * BLOCK + tl.arange(0, BLOCK)
        gradient = factor * tl.load(bias_gradient_ptr + unit, mask=unit < units, other=0.0)
        update_bias(gradient, unit, units, bias_ptr, bias_first_ptr, bias_second_ptr, scalars, OPTIMIZER)


def clip_factor(
    gradients: torch.Tensor, squares: torch.Tensor, tickets: torch.Tensor, factor: torch.Tensor, clock: Clock
) -> None:
    """Fills factor `[1]` from all gradients, one vector; `squares` is fp32 scratch `[square_programs(len(gradients))]`.

    `tickets` is int64 `[1]`: zero before the first call, then only incremented, never reset.
    """
    programs = len(squares)
    launch_step(
        clock,
        clip_factor_kernel,
        (programs,),
        (gradients, squares, tickets, factor, clock.control, clock.table),
        (clock.step,),
        (len(gradients), programs),
        (SQUARES_PER_PROGRAM, next_power_of_2(programs)),
    )


def clipped_update(factor: torch.Tensor, stored: Weights, weights: Weights, clock: Clock, *, optimizer: str) -> None:
    """One optimizer step for `weights`, given factor `[1]` and the gradients `stored.weight_first` and `stored.bias_first`."""
    total, units = (0 if tensor is None else tensor.numel() for tensor in (weights.weight, weights.bias))
    launch_step(
        clock,
        clipped_update_kernel,
        (ceil_div(total, WEIGHTS_PER_PROGRAM) + ceil_div(units, WEIGHTS_PER_PROGRAM),),
        (
            factor, stored.weight_first, weights.weight, weights.copy, weights.weight_first, weights.weight_second,
            stored.bias_first, weights.bias, weights.bias_first, weights.bias_second, clock.control, clock.table,
        ),
        (clock.step,),
        (total, units),
        (WEIGHTS_PER_PROGRAM, optimizer),
    )  # fmt: skip
