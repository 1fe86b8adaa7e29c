"""The last Linear, the loss and both gradients with one program per row: for batches so small that only latency matters.

`output_layer`, with tiles of rows and tensor cores, takes 16 µs at 32 rows of 2048 inputs on an H200: it waits for one load
after another. A program with one row loads all weights at once, and keeps them for the input gradient where they fit.
tests/engines/graph/test_parity.py covers it with every loss, with the shape "small".
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.output_layer import loss_and_gradient
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
from onelaunch.integers import next_power_of_2
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel

MAX_WEIGHT_BYTES = 131_072  # that a program holds at once: 64 registers per thread
MAX_WARPS = 16


@triton.jit
def load_row(x_ptr, x_row, start, k, BLOCK_K: tl.constexpr):
    """A row of x, also for a position past the end of a short batch: its result is masked, and a check would delay the load."""
    inner = start + tl.arange(0, BLOCK_K)
    return tl.load(x_ptr + x_row[:, None] * k + inner[None, :], mask=(inner < k)[None, :], other=0)


@triton.jit
def load_weights(w_ptr, start, outputs, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):
    inner = start + tl.arange(0, BLOCK_K)
    output = tl.arange(0, WIDTH)
    inside = (output < outputs)[:, None] & (inner < k)[None, :]
    return tl.load(w_ptr + output[:, None] * k + inner[None, :], mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def product(x, w, kind: tl.constexpr):
    """w · x with operands rounded as for a tensor core, summed in fp32."""
    w, x = w.to(kind).to(tl.float32), as_features(x, kind).to(tl.float32)
    if kind != tl.float32:
        return tl.sum(w * x, axis=1)
    # Round the products before they are added: fused with the first addition across lanes, lanes would hold different sums.
    return tl.sum(tl.fma(w, x, tl.zeros_like(w)), axis=1)


@triton.jit
def store_input_gradient(
    factor, x, w, z_ptr, dx_ptr, seed, run_step, layer, row, start, threshold, keep_scale, inverse_scale, k,
    BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Z: tl.constexpr, DROPOUT: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    inner = start + tl.arange(0, BLOCK_K)
    inside = (inner < k)[None, :]
    element = row.to(tl.int64)[:, None] * k + inner[None, :]
    dx = tl.sum(w.to(kind).to(tl.float32) * factor[:, None], axis=0)[None, :]
    if DROPOUT:
        keep = dropout_keep(seed, run_step, layer, row, start, threshold, 1, BLOCK_K)
        dx = tl.where(keep, dx * keep_scale, 0.0)
    if ACTIVATION is not None:
        saved = x
        if FROM_Z:
            saved = tl.load(z_ptr + element, mask=inside, other=0.0)
        dx *= derivative(saved, inverse_scale, ACTIVATION, FROM_Z)
    tl.store(dx_ptr + element, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "step", "threshold", "layer"])
def output_layer_small_batch_kernel(
    x_ptr,
    order_ptr,
    w_ptr,
    bias_ptr,
    target_ptr,
    weight_ptr,
    z_ptr,
    gradient_ptr,
    dx_ptr,
    data_ptr,
    gathered_ptr,
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
    features,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FEATURES: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    LOSS: tl.constexpr,
    GATHER: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_Z: tl.constexpr,
    DROPOUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """ONE_BLOCK: BLOCK_K covers all k inputs."""
    kind: tl.constexpr = gradient_ptr.dtype.element_ty
    index = tl.load(control_ptr + EPOCH_STEP, cache_modifier=".cg") + step
    program = tl.program_id(0)
    row = program + tl.arange(0, 1)
    output = tl.arange(0, WIDTH)
    if ONE_BLOCK:
        w = load_weights(w_ptr, 0, outputs, k, WIDTH, BLOCK_K)
    source, taken = gathered_rows(order_ptr, table_ptr, index, row, batch)
    if gathered_ptr is not None:
        feature = tl.arange(0, FEATURES)[None, :]
        inside = feature < features
        features_row = tl.load(data_ptr + source[:, None] * features + feature, mask=taken[:, None] & inside, other=0)
    x_row = source if GATHER else row.to(tl.int64)
    wait_for_previous_kernel(OVERLAP)  # x comes from it; nothing is stored before, since buffers share memory
    if gathered_ptr is not None:
        tl.store(gathered_ptr + row[:, None] * features + feature, as_features(features_row, kind), mask=inside)
    if ONE_BLOCK:
        x = load_row(x_ptr, x_row, 0, k, BLOCK_K)
        sums = product(x, w, kind)
    else:
        sums = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, k, BLOCK_K):
            x_part = load_row(x_ptr, x_row, start, k, BLOCK_K)
            sums += product(x_part, load_weights(w_ptr, start, outputs, k, WIDTH, BLOCK_K), kind)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + output, mask=output < outputs, other=0.0)
    allow_next_kernel(OVERLAP)
    loss, gradient, correct = loss_and_gradient(
        sums[None, :], target_ptr, weight_ptr, source, taken, outputs, hyper(table_ptr, LABEL_SMOOTHING), WIDTH, LOSS
    )
    tl.store(loss_parts_ptr + program + tl.arange(0, 1), loss)
    if LOSS != "mse":
        tl.atomic_add(
            control_ptr + CORRECT, tl.sum(correct, axis=0), sem="relaxed"
        )  # integer sums do not depend on the order
    rounded = gradient.to(kind)
    tl.store(gradient_ptr + row[:, None] * outputs + output[None, :], rounded, mask=(output < outputs)[None, :])

    if dx_ptr is not None:
        factor = tl.sum(rounded.to(tl.float32), axis=0)  # a sum over one row only changes the shape
        run_step = tl.load(control_ptr + RUN_STEP) + step
        if ONE_BLOCK:
            store_input_gradient(
                factor, x, w, z_ptr, dx_ptr, seed, run_step, layer, row, 0, threshold, keep_scale, inverse_scale, k,
                BLOCK_K, ACTIVATION, FROM_Z, DROPOUT, kind,
            )  # fmt: skip
        else:
            for start in range(0, k, BLOCK_K):
                x_part = load_row(x_ptr, x_row, start, k, BLOCK_K)
                w_part = load_weights(w_ptr, start, outputs, k, WIDTH, BLOCK_K)
                store_input_gradient(
                    factor, x_part, w_part, z_ptr, dx_ptr, seed, run_step, layer, row, start, threshold, keep_scale,
                    inverse_scale, k, BLOCK_K, ACTIVATION, FROM_Z, DROPOUT, kind,
                )  # fmt: skip


def output_layer_small_batch(
    x: Rows, order: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: Targets,
    z: torch.Tensor | None, gradient: torch.Tensor, dx: torch.Tensor | None, loss_parts: torch.Tensor, before: Epilogue,
    clock: Clock, *, loss: str, data: torch.Tensor | None = None, gathered: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """`output_layer` without column sums; `loss_parts` has one element per row.

    Also fills `gathered`, if given, with this step's rows of `data`: the first Linear's update reads them without having to
    load the row order first.
    """
    batch, outputs = gradient.shape
    k = weight.shape[1]
    seed, threshold, layer, scale = before.dropout_values
    width = next_power_of_2(outputs)
    features = 1 if gathered is None else gathered.shape[1]
    held = MAX_WEIGHT_BYTES // weight.element_size()
    block = min(max(8, next_power_of_2(k)), held // width)
    launch_step(
        clock,
        output_layer_small_batch_kernel,
        (batch,),
        (x.values, order, weight, bias, *target, z, gradient, dx, data, gathered, loss_parts, clock.control, clock.table),
        (seed, clock.step, threshold, layer, scale, 1 - before.p),
        (batch, outputs, k, features),
        (
            width, block, next_power_of_2(features), k <= block, loss, x.order is not None, before.activation,
            before.saves_input, before.p > 0,
        ),
        num_warps=MAX_WARPS if width * block >= held // 2 else 4,
    )  # fmt: skip
