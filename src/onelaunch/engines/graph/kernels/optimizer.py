"""The optimizers' update of a tile of weights in registers: the epilogue of a GEMM that computes their gradient.

The gradient never reaches memory; weights and optimizer states are read and written once. The exception is STORE_GRADIENT,
for clipping (clip.py). tests/engines/graph/test_parity.py compares every update with the eager engine's.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_state import (
    BETA2,
    DECAY,
    EPS,
    INVERSE_ROOT,
    MOMENTUM,
    NEW_MEAN,
    NEW_SQUARE,
    RATE,
    ROW_WEIGHT,
    WEIGHT_DECAY,
    hyper,
    scalar,
)


@triton.jit
def update_scalars(table_ptr, index):
    """What `updated` needs, read once: inside a loop that stores, the compiler must not move these loads out."""
    return (
        scalar(table_ptr, index, ROW_WEIGHT), scalar(table_ptr, index, RATE), scalar(table_ptr, index, INVERSE_ROOT),
        scalar(table_ptr, index, DECAY), hyper(table_ptr, MOMENTUM), hyper(table_ptr, WEIGHT_DECAY),
        hyper(table_ptr, NEW_MEAN), hyper(table_ptr, BETA2), hyper(table_ptr, NEW_SQUARE), hyper(table_ptr, EPS),
    )  # fmt: skip


@triton.jit
def updated(w, gradient, first_ptr, second_ptr, offset, inside, scalars, OPTIMIZER: tl.constexpr):
    """The weights after the step, given the gradient of the batch's summed loss. Also writes the states at `offset`.

    `first_ptr` and `second_ptr` are the optimizer's states in the order of `Optimizer.state_names`. OPTIMIZER is a name in
    `onelaunch.optimizers`, with "momentum" and "nesterov" for sgd that has them. "store_gradient" only writes the gradient to
    `first_ptr`.
    """
    row_weight, rate, inverse_root, decay, momentum, weight_decay, new_mean, beta2, new_square, eps = scalars
    g = gradient * row_weight
    if OPTIMIZER != "adamw" and OPTIMIZER != "lion":
        g += weight_decay * w
    if OPTIMIZER == "store_gradient":
        tl.store(first_ptr + offset, gradient, mask=inside)
    elif OPTIMIZER == "sgd":
        w = w + rate * g
    elif OPTIMIZER == "momentum" or OPTIMIZER == "nesterov":
        velocity = momentum * tl.load(first_ptr + offset, mask=inside, other=0.0) + g
        tl.store(first_ptr + offset, velocity, mask=inside)
        if OPTIMIZER == "nesterov":
            velocity = g + momentum * velocity
        w = w + rate * velocity
    elif OPTIMIZER == "rmsprop":
        square = beta2 * tl.load(first_ptr + offset, mask=inside, other=0.0) + new_square * g * g
        tl.store(first_ptr + offset, square, mask=inside)
        direction = g / (tl.sqrt(square) + eps)
        if second_ptr is not None:
            direction += momentum * tl.load(second_ptr + offset, mask=inside, other=0.0)
            tl.store(second_ptr + offset, direction, mask=inside)
        w = w + rate * direction
    elif OPTIMIZER == "lion":
        mean = tl.load(first_ptr + offset, mask=inside, other=0.0)
        mixed = mean + new_mean * (g - mean)
        tl.store(first_ptr + offset, mean + new_square * (g - mean), mask=inside)
        w = w * decay + rate * ((mixed > 0).to(tl.float32) - (mixed < 0).to(tl.float32))
    else:
        tl.static_assert(OPTIMIZER == "adam" or OPTIMIZER == "adamw")
        mean = tl.load(first_ptr + offset, mask=inside, other=0.0)
        mean += new_mean * (g - mean)
        square = beta2 * tl.load(second_ptr + offset, mask=inside, other=0.0) + new_square * g * g
        tl.store(first_ptr + offset, mean, mask=inside)
        tl.store(second_ptr + offset, square, mask=inside)
        if OPTIMIZER == "adamw":
            w = w * decay
        w = w + rate * (mean / (tl.sqrt(square) * inverse_root + eps))
    return w


@triton.jit
def update_in_place(
    w, gradient, offset, inside, w_ptr, copy_ptr, first_ptr, second_ptr, scalars, OPTIMIZER: tl.constexpr
):  # fmt: skip
    w = updated(w, gradient, first_ptr, second_ptr, offset, inside, scalars, OPTIMIZER)
    if OPTIMIZER != "store_gradient":
        tl.store(w_ptr + offset, w, mask=inside)
        if copy_ptr is not None:
            tl.store(copy_ptr + offset, w.to(copy_ptr.dtype.element_ty), mask=inside)


@triton.jit
def update_bias(gradient, unit, n, bias_ptr, first_ptr, second_ptr, scalars, OPTIMIZER: tl.constexpr):
    bias = tl.load(bias_ptr + unit, mask=unit < n, other=0.0)
    update_in_place(bias, gradient, unit, unit < n, bias_ptr, None, first_ptr, second_ptr, scalars, OPTIMIZER)
