"""What follows a hidden Linear beyond its epilogue, one program per few rows: `dropout(act(norm(p + before))) + after`.

p is the output of the Linear with its own activation and dropout; each part is optional. A row stays in registers. The
backward pass computes the row's statistics again from p, so that nothing but p is kept. It continues through the Linear's
epilogue to dz, sends the gradient of an addition to its source, and the last program to finish updates scale and shift of
the LayerNorm from all programs' sums, in a fixed order.
tests/engines/graph/test_row_segment.py compares both with the eager engine.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.optimizer import update_bias, update_scalars
from onelaunch.engines.graph.kernels.run_arguments import (
    Clock,
    Epilogue,
    Weights,
    backward_programs,
    backward_rows,
    segment_width,
)
from onelaunch.engines.graph.kernels.run_state import EPOCH_STEP, RUN_STEP, derivative, dropout_keep, launch_step
from onelaunch.integers import ceil_div
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.tiles import activate, activation_gradient

PARTS_AT_ONCE = 8192  # elements of the programs' sums that the last program loads at once


@triton.jit
def normalised(v, real, n, eps):
    """(v - mean) / sqrt(variance + eps) of each row, zero where `real` is false, and 1 / sqrt(variance + eps)."""
    mean = tl.sum(tl.where(real, v, 0.0), axis=1) / n
    gap = tl.where(real, v - mean[:, None], 0.0)
    deviation = 1 / tl.sqrt(tl.sum(gap * gap, axis=1) / n + eps)
    return gap * deviation[:, None], deviation


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def segment_forward_kernel(
    p_ptr,
    before_ptr,
    middle_ptr,
    scale_ptr,
    shift_ptr,
    after_ptr,
    h_ptr,
    control_ptr,
    seed: tl.int64,
    step: tl.int32,
    threshold: tl.int32,
    layer: tl.int32,
    keep_scale,
    eps,
    batch,
    n,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, WIDTH)
    real = (unit < n)[None, :]
    inside = (row < batch)[:, None] & real
    element = row.to(tl.int64)[:, None] * n + unit[None, :]
    v = tl.load(p_ptr + element, mask=inside, other=0.0).to(tl.float32)
    if before_ptr is not None:
        v += tl.load(before_ptr + element, mask=inside, other=0.0).to(tl.float32)
        if middle_ptr is not None:
            tl.store(middle_ptr + element, v.to(middle_ptr.dtype.element_ty), mask=inside)
    allow_next_kernel(OVERLAP)
    if NORM:
        v, _ = normalised(v, real, n, eps)
        if scale_ptr is not None:
            v *= tl.load(scale_ptr + unit, mask=unit < n, other=0.0)[None, :]
        if shift_ptr is not None:
            v += tl.load(shift_ptr + unit, mask=unit < n, other=0.0)[None, :]
    v = activate(v, ACTIVATION)
    if DROPOUT:
        run_step = tl.load(control_ptr + RUN_STEP) + step
        keep = dropout_keep(seed, run_step, layer, row, 0, threshold, ROWS, WIDTH)
        v = tl.where(keep, v * keep_scale, 0.0)
    if after_ptr is not None:
        v += tl.load(after_ptr + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(h_ptr + element, v.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer", "first_threshold", "first_layer"])
def segment_backward_kernel(
    dh_ptr,
    skip_ptr,
    p_ptr,
    z_ptr,
    before_ptr,
    scale_ptr,
    shift_ptr,
    skip_middle_ptr,
    to_after_ptr,
    to_before_ptr,
    dz_ptr,
    parts_ptr,
    tickets_ptr,
    scale_first_ptr,
    scale_second_ptr,
    shift_first_ptr,
    shift_second_ptr,
    control_ptr,
    table_ptr,
    seed: tl.int64,
    step: tl.int32,
    threshold: tl.int32,
    layer: tl.int32,
    keep_scale,
    eps,
    first_threshold: tl.int32,
    first_layer: tl.int32,
    first_keep_scale,
    first_inverse_scale,
    batch,
    n,
    programs,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DROPOUT: tl.constexpr,
    FIRST_ACTIVATION: tl.constexpr,
    FIRST_FROM_Z: tl.constexpr,
    FIRST_DROPOUT: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    unit = tl.arange(0, WIDTH)
    real = (unit < n)[None, :]
    scale_sum = tl.zeros((WIDTH,), tl.float32)
    shift_sum = tl.zeros((WIDTH,), tl.float32)
    run_step = tl.load(control_ptr + RUN_STEP, cache_modifier=".cg") + step
    for first in range(program * ROWS, batch, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < batch)[:, None] & real
        element = row.to(tl.int64)[:, None] * n + unit[None, :]
        p = tl.load(p_ptr + element, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        v = p
        if before_ptr is not None:
            v += tl.load(before_ptr + element, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        if NORM:
            normal, deviation = normalised(v, real, n, eps)
            v = normal
            if scale_ptr is not None:
                scale = tl.load(scale_ptr + unit, mask=unit < n, other=0.0, cache_modifier=".cg")[None, :]
                v *= scale
            if shift_ptr is not None:
                v += tl.load(shift_ptr + unit, mask=unit < n, other=0.0, cache_modifier=".cg")[None, :]
        wait_for_previous_kernel(OVERLAP)  # only dh comes from it
        g = tl.load(dh_ptr + element, mask=inside, other=0.0).to(tl.float32)
        if skip_ptr is not None:
            g += tl.load(skip_ptr + element, mask=inside, other=0.0)
        if to_after_ptr is not None:
            tl.store(to_after_ptr + element, g, mask=inside)
        if DROPOUT:
            keep = dropout_keep(seed, run_step, layer, row, 0, threshold, ROWS, WIDTH)
            g = tl.where(keep, g * keep_scale, 0.0)
        if ACTIVATION is not None:
            g *= activation_gradient(v, ACTIVATION)
        if NORM:
            g = tl.where(inside, g, 0.0)
            scale_sum += tl.sum(g * normal, axis=0)
            shift_sum += tl.sum(g, axis=0)
            if scale_ptr is not None:
                g *= scale
            mean, slope = tl.sum(g, axis=1) / n, tl.sum(g * normal, axis=1) / n
            g = (g - mean[:, None] - normal * slope[:, None]) * deviation[:, None]
        if skip_middle_ptr is not None:
            g += tl.load(skip_middle_ptr + element, mask=inside, other=0.0)
        if to_before_ptr is not None:
            tl.store(to_before_ptr + element, g, mask=inside)
        if FIRST_DROPOUT:
            keep = dropout_keep(seed, run_step, first_layer, row, 0, first_threshold, ROWS, WIDTH)
            g = tl.where(keep, g * first_keep_scale, 0.0)
        if FIRST_ACTIVATION is not None:
            if FIRST_FROM_Z:
                saved = tl.load(z_ptr + element, mask=inside, other=0.0).to(tl.float32)
            else:
                saved = p
            g *= derivative(saved, first_inverse_scale, FIRST_ACTIVATION, FIRST_FROM_Z)
        tl.store(dz_ptr + element, g.to(dz_ptr.dtype.element_ty), mask=inside)
    allow_next_kernel(OVERLAP)
    if parts_ptr is not None:
        tl.store(parts_ptr + 2 * program * n + unit, scale_sum, mask=unit < n)
        tl.store(parts_ptr + (2 * program + 1) * n + unit, shift_sum, mask=unit < n)
        tl.debug_barrier()  # all threads have stored their sums before one thread takes the ticket
        last = tl.atomic_add(tickets_ptr, 1, sem="acq_rel") % programs == programs - 1
        if last:
            scalars = update_scalars(table_ptr, tl.load(control_ptr + EPOCH_STEP) + step)
            scale_sum = tl.zeros((WIDTH,), tl.float32)
            shift_sum = tl.zeros((WIDTH,), tl.float32)
            for start in range(0, programs, PARTS):  # many at once: the next kernel waits for this one
                one = (start + tl.arange(0, PARTS))[:, None]
                at, here = parts_ptr + 2 * one * n + unit[None, :], (one < programs) & real
                scale_sum += tl.sum(tl.load(at, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
                shift_sum += tl.sum(tl.load(at + n, mask=here, other=0.0, cache_modifier=".cg"), axis=0)
            if scale_ptr is not None:
                update_bias(scale_sum, unit, n, scale_ptr, scale_first_ptr, scale_second_ptr, scalars, OPTIMIZER)
            if shift_ptr is not None:
                update_bias(shift_sum, unit, n, shift_ptr, shift_first_ptr, shift_second_ptr, scalars, OPTIMIZER)


class Segment(NamedTuple):
    """The constants of a segment, and the LayerNorm's parameters: `norm.weight` is the scale, `norm.bias` the shift."""

    epilogue: Epilogue
    normalises: bool
    eps: float
    norm: Weights | None

    @property
    def parameters(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)


def _warps(width: int) -> int:
    return 4 if width <= 1024 else 8


def segment_forward(
    p: torch.Tensor, before: torch.Tensor | None, middle: torch.Tensor | None, after: torch.Tensor | None, h: torch.Tensor,
    segment: Segment, clock: Clock,
) -> None:  # fmt: skip
    """Fills h `[batch, n]` and, if given, `middle`, the sum p + before."""
    batch, n = h.shape
    width = segment_width(n)
    rows = max(1, 512 // width)
    seed, threshold, layer, scale = segment.epilogue.dropout_values
    launch_step(
        clock,
        segment_forward_kernel,
        (ceil_div(batch, rows),),
        (p, before, middle, *segment.parameters, after, h, clock.control),
        (seed, clock.step, threshold, layer, scale, segment.eps),
        (batch, n),
        (rows, width, segment.normalises, segment.epilogue.activation, segment.epilogue.p > 0),
        num_warps=_warps(width),
    )


def segment_backward(
    dh: torch.Tensor, skip: torch.Tensor | None, p: torch.Tensor, z: torch.Tensor | None, before: torch.Tensor | None,
    skip_middle: torch.Tensor | None, to_after: torch.Tensor | None, to_before: torch.Tensor | None, dz: torch.Tensor,
    parts: torch.Tensor | None, tickets: torch.Tensor | None, segment: Segment, first: Epilogue, clock: Clock, *,
    optimizer: str,
) -> None:  # fmt: skip
    """Fills dz `[batch, n]`, the gradient of the Linear's output, from dh, that of the segment's.

    `first` is the epilogue of the Linear and `z` its saved input if it needs one. `skip` and `skip_middle` have gradients that
    reach h and p + before through additions; `to_after` and `to_before` get those of this segment's. `parts` is fp32 scratch
    `[programs, 2, n]`, `tickets` as in `fused_backward`.
    """
    batch, n = dz.shape
    width = segment_width(n)
    seed, threshold, layer, scale = segment.epilogue.dropout_values
    _, first_threshold, first_layer, first_scale = first.dropout_values
    states: tuple[torch.Tensor | None, ...] = (None,) * 4
    if segment.norm is not None:
        norm = segment.norm
        states = (norm.weight_first, norm.weight_second, norm.bias_first, norm.bias_second)
    launch_step(
        clock,
        segment_backward_kernel,
        (backward_programs(batch, n),),
        (
            dh, skip, p, z, before, *segment.parameters, skip_middle, to_after, to_before, dz, parts, tickets, *states,
            clock.control, clock.table,
        ),
        (
            seed, clock.step, threshold, layer, scale, segment.eps, first_threshold, first_layer, first_scale, 1 - first.p,
        ),
        (batch, n, backward_programs(batch, n)),
        (
            backward_rows(n), width, max(2, PARTS_AT_ONCE // width), segment.normalises, segment.epilogue.activation,
            segment.epilogue.p > 0, first.activation, first.saves_input, first.p > 0, optimizer,
        ),
        num_warps=_warps(width),
    )  # fmt: skip
