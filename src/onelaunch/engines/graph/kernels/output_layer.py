"""The last Linear, the loss, its gradient and the gradient of the Linear's input in one kernel: a program owns whole rows.

Logits never reach memory. Gradients are those of the *summed* loss, and the optimizer's epilogue divides by the number of
rows; otherwise fp16 gradients of a large batch would vanish. The kernels that update the weights add up the per-program sums
of the loss and of the gradients' columns, in a fixed order.
tests/engines/graph/test_parity.py covers it with every loss, with the shape "large".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_arguments import Clock, Epilogue, Rows, Targets
from onelaunch.engines.graph.kernels.run_state import (
    CORRECT,
    EPOCH_STEP,
    LABEL_SMOOTHING,
    RUN_STEP,
    as_features,
    derivative,
    dropout_keep,
    gathered_rows,
    hyper,
    launch_step,
)
from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dependent_launch import wait_for_previous_kernel
from onelaunch.kernels.gemm_tile import GemmTile


@triton.jit
def loss_and_gradient(
    logits, target_ptr, weight_ptr, source, taken, outputs, smoothing, WIDTH: tl.constexpr, LOSS: tl.constexpr
):  # fmt: skip
    """(loss per row, gradient `[rows, WIDTH]`, correct predictions per row); zero where `taken` is false.

    `weight_ptr`: the weights of the data's rows, by which loss and gradient are multiplied; None without weights.
    """
    output = tl.arange(0, WIDTH)
    real = (output < outputs)[None, :]
    if LOSS == "cross_entropy":
        target = tl.load(target_ptr + source, mask=taken, other=0)
        masked = tl.where(real, logits, float("-inf"))
        largest = tl.max(masked, axis=1)
        exponential = tl.exp(masked - largest[:, None])
        total = tl.sum(exponential, axis=1)
        lse = largest + tl.log(total)
        hit = output[None, :] == target[:, None]
        picked = tl.sum(tl.where(hit, logits, 0.0), axis=1)
        mean = tl.sum(tl.where(real, logits, 0.0), axis=1) / outputs
        loss = lse - (1 - smoothing) * picked - smoothing * mean
        gradient = exponential / total[:, None] - tl.where(hit, 1 - smoothing, 0.0) - smoothing / outputs
        correct = (tl.argmax(masked, axis=1) == target).to(tl.int64)
    else:
        inside = taken[:, None] & real
        target = tl.load(target_ptr + source[:, None] * outputs + output[None, :], mask=inside, other=0.0)
        if LOSS == "mse":
            difference = tl.where(real, logits - target, 0.0)
            loss = tl.sum(difference * difference, axis=1)
            gradient = 2 * difference
            correct = tl.zeros_like(source)
        else:
            tl.static_assert(LOSS == "bce_with_logits")
            decay = tl.exp(-tl.abs(logits))
            each = tl.maximum(logits, 0.0) - logits * target + tl.log(1 + decay)
            loss = tl.sum(tl.where(real, each, 0.0), axis=1)
            gradient = tl.where(logits >= 0, 1.0, decay) / (1 + decay) - target
            correct = tl.sum((real & ((logits > 0) == (target > 0.5))).to(tl.int64), axis=1)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + source, mask=taken, other=0.0)
        loss = loss * weight
        gradient = gradient * weight[:, None]
    loss = tl.where(taken, loss, 0.0)
    correct = tl.where(taken, correct, 0)
    gradient = tl.where(taken[:, None] & real, gradient, 0.0)
    return loss, gradient, correct


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def output_layer_kernel(
    x_ptr,
    order_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    weight_ptr,
    z_ptr,
    gradient_ptr,
    dx_ptr,
    gradient_sums_ptr,
    dx_sums_ptr,
    loss_parts_ptr,
    control_ptr,
    table_ptr,
    seed: tl.int64,
    step: tl.int32,
    threshold: tl.int32,
    layer: tl.int32,
    keep_scale,
    inverse_scale,
    batch,
    outputs,
    k,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LOSS: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_Z: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous_kernel(OVERLAP)
    index = tl.load(control_ptr + EPOCH_STEP) + step
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    source, taken = gathered_rows(order_ptr, table_ptr, index, row, batch)
    x_row = source if GATHER else row.to(tl.int64)
    output = tl.arange(0, WIDTH)
    logits = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + x_row[:, None] * k + inner[None, :], mask=taken[:, None] & (inner < k)[None, :], other=0)
        w = tl.load(
            w_ptr + output[None, :] * k + inner[:, None], mask=(output < outputs)[None, :] & (inner < k)[:, None],
            other=0.0,
        )  # fmt: skip
        x = as_features(x, gradient_ptr.dtype.element_ty)
        logits = tl.dot(x, w.to(x.dtype), logits, input_precision=PRECISION)
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + output, mask=output < outputs, other=0.0)[None, :]

    loss, gradient, correct = loss_and_gradient(
        logits, target_ptr, weight_ptr, source, taken, outputs, hyper(table_ptr, LABEL_SMOOTHING), WIDTH, LOSS
    )
    tl.store(loss_parts_ptr + program, tl.sum(loss, axis=0))
    if LOSS != "mse":
        tl.atomic_add(
            control_ptr + CORRECT, tl.sum(correct, axis=0), sem="relaxed"
        )  # integer sums do not depend on the order
    if gradient_sums_ptr is not None:
        tl.store(gradient_sums_ptr + program * outputs + output, tl.sum(gradient, axis=0), mask=output < outputs)
    rounded = gradient.to(gradient_ptr.dtype.element_ty)
    tl.store(
        gradient_ptr + row.to(tl.int64)[:, None] * outputs + output[None, :], rounded,
        mask=(row < batch)[:, None] & (output < outputs)[None, :],
    )  # fmt: skip

    if dx_ptr is not None:
        run_step = tl.load(control_ptr + RUN_STEP) + step
        for start in range(0, k, BLOCK_K):
            inner = start + tl.arange(0, BLOCK_K)
            inside = (row < batch)[:, None] & (inner < k)[None, :]
            element = row.to(tl.int64)[:, None] * k + inner[None, :]
            w = tl.load(
                w_ptr + output[:, None] * k + inner[None, :], mask=(output < outputs)[:, None] & (inner < k)[None, :],
                other=0.0,
            )  # fmt: skip
            dx = tl.dot(rounded, w.to(rounded.dtype), input_precision=PRECISION)
            if DROPOUT:
                keep = dropout_keep(seed, run_step, layer, row, start, threshold, ROWS, BLOCK_K)
                dx = tl.where(keep, dx * keep_scale, 0.0)
            if ACTIVATION is not None:
                if FROM_Z:
                    saved = tl.load(z_ptr + element, mask=inside, other=0.0)
                else:
                    saved = tl.load(x_ptr + element, mask=inside, other=0.0)
                dx *= derivative(saved, inverse_scale, ACTIVATION, FROM_Z)
            if dx_sums_ptr is not None:
                tl.store(dx_sums_ptr + program * k + inner, tl.sum(dx, axis=0), mask=inner < k)
            tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def output_layer(
    x: Rows, order: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: Targets,
    z: torch.Tensor | None, gradient: torch.Tensor, dx: torch.Tensor | None, gradient_sums: torch.Tensor | None,
    dx_sums: torch.Tensor | None, loss_parts: torch.Tensor, before: Epilogue, clock: Clock, *, loss: str, tile: GemmTile,
    tf32: bool,
) -> None:  # fmt: skip
    """Fills `gradient` `[batch, outputs]` of the logits and `dx` `[batch, k]`, the gradient before the activation that made x.

    `before` is the epilogue that made x, and `z` its saved input if it needs one. Column sums and the loss get one row per
    program of `tile.m` rows. Adds the correct predictions to `control`.
    """
    batch, outputs = gradient.shape
    seed, threshold, layer, scale = before.dropout_values
    launch_step(
        clock,
        output_layer_kernel,
        (ceil_div(batch, tile.m),),
        (
            x.values, order, weight, bias, *target, z, gradient, dx, gradient_sums, dx_sums, loss_parts, clock.control,
            clock.table,
        ),
        (seed, clock.step, threshold, layer, scale, 1 - before.p),
        (batch, outputs, weight.shape[1]),
        (
            tile.m, max(16, next_power_of_2(outputs)), tile.k, loss, x.order is not None, before.activation,
            before.saves_input, before.p > 0, "tf32" if tf32 else "ieee",
        ),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
