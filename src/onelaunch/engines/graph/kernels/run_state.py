"""What the kernels of a training run read from the device instead of from Python: the run's position, scalars, rows and random
numbers. A captured graph can therefore be replayed for any step.

`control` is int64 with the elements CONTROL. `table` is fp32 with TABLE_WIDTH columns: line 0 holds the constants of the run
(HYPER), line 1 + i the scalars of the epoch's i-th step (SCALARS), which the host computes in double precision. `order` holds
the epoch's row order. A kernel gets `step`, the index of its step within the graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_arguments import CONTROL, HYPER, SCALARS, TABLE_WIDTH, Clock
from onelaunch.integers import ceil_div
from onelaunch.kernels.dependent_launch import wait_for_previous_kernel
from onelaunch.kernels.launch import call, launch, launch_options
from onelaunch.kernels.tiles import activation_gradient, activation_gradient_from_output
from onelaunch.rng import permutation_bits, permutation_keys

_TABLE_WIDTH = tl.constexpr(TABLE_WIDTH)
ORDER_BLOCK = 1024

MOMENTUM = tl.constexpr(HYPER.index("momentum"))
WEIGHT_DECAY = tl.constexpr(HYPER.index("weight_decay"))
NEW_MEAN = tl.constexpr(HYPER.index("new_mean"))
BETA2 = tl.constexpr(HYPER.index("beta2"))
NEW_SQUARE = tl.constexpr(HYPER.index("new_square"))
EPS = tl.constexpr(HYPER.index("eps"))
LABEL_SMOOTHING = tl.constexpr(HYPER.index("label_smoothing"))
CLIP_NORM = tl.constexpr(HYPER.index("clip_norm"))

ROW_WEIGHT = tl.constexpr(SCALARS.index("row_weight"))
RATE = tl.constexpr(SCALARS.index("rate"))
INVERSE_ROOT = tl.constexpr(SCALARS.index("inverse_root"))
DECAY = tl.constexpr(SCALARS.index("decay"))
ROWS_IN_BATCH = tl.constexpr(SCALARS.index("rows"))

EPOCH_STEP = tl.constexpr(CONTROL.index("epoch_step"))
RUN_STEP = tl.constexpr(CONTROL.index("run_step"))
CORRECT = tl.constexpr(CONTROL.index("correct"))


@triton.jit
def hyper(table_ptr, COLUMN: tl.constexpr):
    return tl.load(table_ptr + COLUMN, cache_modifier=".cg")


@triton.jit
def scalar(table_ptr, index, COLUMN: tl.constexpr):
    return tl.load(table_ptr + (index + 1) * _TABLE_WIDTH + COLUMN, cache_modifier=".cg")


@triton.jit
def gathered_rows(order_ptr, table_ptr, index, row, batch):
    """The data rows behind positions `row` of this step's batch, int64, and the mask of positions that hold a row.

    Only the last batch of an epoch may hold fewer than `batch` rows.
    """
    taken = row < scalar(table_ptr, index, ROWS_IN_BATCH).to(tl.int32)
    order = tl.load(order_ptr + index * batch + row, mask=taken, other=0, cache_modifier=".cg")
    return order.to(tl.int64), taken


@triton.jit
def as_features(x, kind: tl.constexpr):
    """Values as the model takes them, in the dtype of the products: uint8 means value / 255."""
    if x.dtype == tl.uint8:
        number = (x.to(tl.float32) * (1 / 255)).to(kind)
    else:
        number = x.to(kind)
    return number


@triton.jit
def dropout_keep(seed, run_step, layer, row, first_unit, threshold, ROWS: tl.constexpr, UNITS: tl.constexpr):
    """The keep mask `[ROWS, UNITS]` of `onelaunch.rng.dropout_keep`, for units from `first_unit`, a multiple of 8."""
    group = first_unit // 8 + tl.arange(0, UNITS // 8)
    zero = tl.zeros((ROWS, UNITS // 8), tl.uint32)
    seed = seed.to(tl.int64)
    a, b, c, d = tl.philox_impl(
        zero + group.to(tl.uint32)[None, :],
        zero + row.to(tl.uint32)[:, None],
        zero + run_step.to(tl.uint32),
        zero + layer.to(tl.uint32),
        (seed & 0xFFFFFFFF).to(tl.uint32),
        ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    words = tl.join(tl.join(a, c), tl.join(b, d))
    bits = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(bits, (ROWS, UNITS)).to(tl.int32) < threshold


@triton.jit
def derivative(saved, inverse_scale, ACTIVATION: tl.constexpr, FROM_Z: tl.constexpr):
    """act'(z) in fp32, from z (FROM_Z) or from the activation's output, which dropout has divided by `inverse_scale`."""
    saved = saved.to(tl.float32)
    if ACTIVATION is None:
        result = tl.full(saved.shape, 1.0, tl.float32)
    elif FROM_Z:
        result = activation_gradient(saved, ACTIVATION)
    else:
        result = activation_gradient_from_output(saved * inverse_scale, ACTIVATION)
    return result


@triton.jit
def feistel_round(half, key):
    h = (half ^ key) * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_order_kernel(order_ptr, keys_ptr, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """order[i] = onelaunch.rng.permutation(n, seed, epoch)[i]"""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = position.to(tl.uint32)
    outside = position < n  # still to be sent through the network
    LEFT: tl.constexpr = BITS // 2
    RIGHT: tl.constexpr = BITS - LEFT
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        left = value >> RIGHT
        right = value & ((1 << RIGHT) - 1)
        for pair in tl.static_range(4):  # left and right exchange their widths every round
            key = tl.load(keys_ptr + 2 * pair).to(tl.uint32)
            left, right = right, left ^ (feistel_round(right, key) & ((1 << LEFT) - 1))
            key = tl.load(keys_ptr + 2 * pair + 1).to(tl.uint32)
            left, right = right, left ^ (feistel_round(right, key) & ((1 << RIGHT) - 1))
        walked = (left << RIGHT) | right
        value = tl.where(outside, walked, value)
        outside = outside & (value >= n)
    tl.store(order_ptr + position, value.to(tl.int32), mask=position < n)


@triton.jit
def sum_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts):
    """losses[index] = the mean loss of the batch, from the sums of `loss_parts` programs."""
    total = tl.zeros((1024,), tl.float32)
    for start in range(0, loss_parts, 1024):
        part = start + tl.arange(0, 1024)
        total += tl.load(loss_parts_ptr + part, mask=part < loss_parts, other=0.0)
    tl.store(losses_ptr + index, tl.sum(total, axis=0) * scalar(table_ptr, index, ROW_WEIGHT))


@triton.jit
def advance_kernel(control_ptr, steps):
    tl.store(control_ptr + EPOCH_STEP, tl.load(control_ptr + EPOCH_STEP) + steps)
    tl.store(control_ptr + RUN_STEP, tl.load(control_ptr + RUN_STEP) + steps)


@triton.jit(do_not_specialize=["step"])
def sum_losses_kernel(
    loss_parts_ptr, losses_ptr, control_ptr, table_ptr, step: tl.int32, loss_parts, OVERLAP: tl.constexpr
):  # fmt: skip
    wait_for_previous_kernel(OVERLAP)
    sum_loss(loss_parts_ptr, losses_ptr, table_ptr, tl.load(control_ptr + EPOCH_STEP) + step, loss_parts)


def launch_step(
    clock: Clock, kernel: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], values: tuple[int | float, ...],
    sizes: tuple[int, ...], constants: tuple[Any, ...], *, num_warps: int = 4, num_stages: int = 3,
) -> None:  # fmt: skip
    """`launch` for a kernel of a step, whose last constant is OVERLAP."""
    options = launch_options(num_warps, num_stages, clock.overlap)
    if all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors):
        launch(kernel, grid, tensors, values, sizes, (*constants, clock.overlap), **options)
    else:  # Tensor descriptors need Triton's own launch, slower on the host; a captured graph hides that.
        with torch.cuda.device_of(clock.control):
            call(kernel, grid, *tensors, *values, *sizes, *constants, clock.overlap, **options)


def fill_row_order(order: torch.Tensor, keys: torch.Tensor, seed: int, epoch: int) -> None:
    """Fills the int32 `order` with the epoch's row order; `keys` is int64 scratch of eight elements."""
    words = torch.tensor(permutation_keys(seed, epoch))
    keys.copy_(words.pin_memory() if keys.is_cuda else words, non_blocking=True)
    n = len(order)
    constants = (permutation_bits(n), ORDER_BLOCK)
    launch(row_order_kernel, (ceil_div(n, ORDER_BLOCK),), (order, keys), (), (n,), constants)


def advance(control: torch.Tensor, steps: int) -> None:
    """Moves the run's position by the `steps` steps of a graph, so that the next replay begins after them."""
    launch(advance_kernel, (1,), (control,), (), (steps,), (), num_warps=1)


def sum_losses(loss_parts: torch.Tensor, losses: torch.Tensor, clock: Clock) -> None:
    """losses[step of the epoch] = the sum of `loss_parts` times the row weight in the table."""
    tensors = (loss_parts, losses, clock.control, clock.table)
    launch_step(clock, sum_losses_kernel, (1,), tensors, (clock.step,), (len(loss_parts),), ())
