"""What the kernels of a training run read from the device instead of from Python: where the run is, its scalars, its rows, its
random numbers. A captured graph can therefore be replayed for any step.

`control` is int64: the next step's place in the epoch, its number in the run, and the right predictions so far. `table` is
fp32 with WIDTH columns: line 0 holds what does not change (HYPER), line 1 + i the scalars of the epoch's i-th step (SCALARS),
made in double precision by the host. `order` holds the epoch's rows. A kernel gets `step`, its step's number in the graph.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_arguments import WIDTH, Clock
from onelaunch.kernels.dependent_launch import wait_for_previous_kernel
from onelaunch.kernels.launch import call, cdiv, launch, launch_options
from onelaunch.kernels.tiles import activation_gradient, activation_gradient_from_output
from onelaunch.rng import permutation_bits, permutation_keys

_WIDTH = tl.constexpr(WIDTH)
ORDER_BLOCK = 1024


@triton.jit
def hyper(table_ptr, COLUMN: tl.constexpr):
    return tl.load(table_ptr + COLUMN, cache_modifier=".cg")


@triton.jit
def scalar(table_ptr, index, COLUMN: tl.constexpr):
    return tl.load(table_ptr + (index + 1) * _WIDTH + COLUMN, cache_modifier=".cg")


@triton.jit
def gathered_rows(order_ptr, table_ptr, index, row, batch):
    """The data rows of places `row` of this step's batch, and which places are taken (the epoch's last batch may be short)."""
    taken = row < scalar(table_ptr, index, 4).to(tl.int32)
    order = tl.load(order_ptr + index * batch + row, mask=taken, other=0, cache_modifier=".cg")
    return order.to(tl.int64), taken


@triton.jit
def as_number(x, kind: tl.constexpr):
    """Values as the model takes them, in the type of the products: uint8 means value / 255."""
    if x.dtype == tl.uint8:
        number = (x.to(tl.float32) * (1 / 255)).to(kind)
    else:
        number = x.to(kind)
    return number


@triton.jit
def run_keep(seed, run_step, layer, row, first_unit, threshold, ROWS: tl.constexpr, UNITS: tl.constexpr):
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
def slope(saved, inverse_scale, ACTIVATION: tl.constexpr, FROM_Z: tl.constexpr):
    """act'(z) in fp32, from z or from the output, which dropout has divided by `inverse_scale`."""
    saved = saved.to(tl.float32)
    if ACTIVATION is None:
        result = tl.full(saved.shape, 1.0, tl.float32)
    elif FROM_Z:
        result = activation_gradient(saved, ACTIVATION)
    else:
        result = activation_gradient_from_output(saved * inverse_scale, ACTIVATION)
    return result


@triton.jit
def mixed(half, key):
    """The Feistel network's round function."""
    h = (half ^ key) * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_order_kernel(order_ptr, keys_ptr, n, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """order[i] = onelaunch.rng.permutation(n, seed, epoch)[i]"""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = place.to(tl.uint32)
    outside = place < n  # still to be sent through the network
    LEFT: tl.constexpr = BITS // 2
    RIGHT: tl.constexpr = BITS - LEFT
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        left = value >> RIGHT
        right = value & ((1 << RIGHT) - 1)
        for pair in tl.static_range(4):  # the halves trade widths every round
            key = tl.load(keys_ptr + 2 * pair).to(tl.uint32)
            left, right = right, left ^ (mixed(right, key) & ((1 << LEFT) - 1))
            key = tl.load(keys_ptr + 2 * pair + 1).to(tl.uint32)
            left, right = right, left ^ (mixed(right, key) & ((1 << RIGHT) - 1))
        walked = (left << RIGHT) | right
        value = tl.where(outside, walked, value)
        outside = outside & (value >= n)
    tl.store(order_ptr + place, value.to(tl.int32), mask=place < n)


@triton.jit
def add_up_loss(loss_parts_ptr, losses_ptr, table_ptr, index, loss_parts):
    """losses[index] = the mean of the batch, from each program's sum."""
    total = tl.zeros((1024,), tl.float32)
    for start in range(0, loss_parts, 1024):
        part = start + tl.arange(0, 1024)
        total += tl.load(loss_parts_ptr + part, mask=part < loss_parts, other=0.0)
    tl.store(losses_ptr + index, tl.sum(total, axis=0) * scalar(table_ptr, index, 0))


@triton.jit
def advance_kernel(control_ptr, steps):
    """The graph's steps are done: the next replay begins after them."""
    tl.store(control_ptr, tl.load(control_ptr) + steps)
    tl.store(control_ptr + 1, tl.load(control_ptr + 1) + steps)


def launch_step(
    clock: Clock, kernel: Any, grid: tuple[int, ...], tensors: tuple[Any, ...], values: tuple[int | float, ...],
    sizes: tuple[int, ...], constants: tuple[Any, ...], *, num_warps: int = 4, num_stages: int = 3,
) -> None:  # fmt: skip
    """`launch` for a kernel of a step, whose last constant is OVERLAP."""
    options = launch_options(num_warps, num_stages, clock.overlap)
    if all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors):
        launch(kernel, grid, tensors, values, sizes, (*constants, clock.overlap), **options)
    else:  # tensor descriptors take Triton's own way, slower on the host, which a captured graph does not feel
        with torch.cuda.device_of(clock.control):
            call(kernel, grid, *tensors, *values, *sizes, *constants, clock.overlap, **options)


def fill_row_order(order: torch.Tensor, keys: torch.Tensor, seed: int, epoch: int) -> None:
    """Fills the int32 `order` with the epoch's row order; `keys` is int64 scratch of eight."""
    words = torch.tensor(permutation_keys(seed, epoch))
    keys.copy_(words.pin_memory() if keys.is_cuda else words, non_blocking=True)
    n = len(order)
    launch(
        row_order_kernel,
        (cdiv(n, ORDER_BLOCK),),
        (order, keys),
        (),
        (n,),
        (permutation_bits(n), ORDER_BLOCK),
    )


def advance(control: torch.Tensor, steps: int) -> None:
    launch(advance_kernel, (1,), (control,), (), (steps,), (), num_warps=1)


@triton.jit(do_not_specialize=["step"])
def add_up_losses_kernel(
    loss_parts_ptr, losses_ptr, control_ptr, table_ptr, step: tl.int32, loss_parts, OVERLAP: tl.constexpr
):  # fmt: skip
    wait_for_previous_kernel(OVERLAP)
    add_up_loss(loss_parts_ptr, losses_ptr, table_ptr, tl.load(control_ptr) + step, loss_parts)


def add_up_losses(loss_parts: torch.Tensor, losses: torch.Tensor, clock: Clock) -> None:
    """losses[place] = the sum of the parts times the table's row weight."""
    launch_step(
        clock,
        add_up_losses_kernel,
        (1,),
        (loss_parts, losses, clock.control, clock.table),
        (clock.step,),
        (len(loss_parts),),
        (),
    )
