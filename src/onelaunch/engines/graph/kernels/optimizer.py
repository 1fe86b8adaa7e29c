"""SGD, Adam and AdamW on a tile of weights that is in registers anyway: the update as a GEMM's epilogue.

The gradient arrives as it was summed and never reaches memory; weights and optimizer state are read and written once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.run_state import hyper, scalar


@triton.jit
def update_scalars(table_ptr, index):
    """What `updated` needs, read once: inside a loop that stores, the compiler must not move these loads out."""
    return (
        scalar(table_ptr, index, 0), scalar(table_ptr, index, 1), scalar(table_ptr, index, 2),
        scalar(table_ptr, index, 3), hyper(table_ptr, 0), hyper(table_ptr, 1), hyper(table_ptr, 2), hyper(table_ptr, 3),
        hyper(table_ptr, 4), hyper(table_ptr, 5),
    )  # fmt: skip


@triton.jit
def updated(w, gradient, first_ptr, second_ptr, place, inside, scalars, OPTIMIZER: tl.constexpr):
    """The weights after the step, from the gradient of the batch's summed loss; writes the state at `place`.

    `first_ptr` is the momentum or Adam's mean, None for plain SGD; `second_ptr` Adam's mean of squares. OPTIMIZER is one of
    "sgd", "momentum", "nesterov", "adam", "adamw".
    """
    row_weight, rate, inverse_root, decay, momentum, weight_decay, new_mean, beta2, new_square, eps = scalars
    g = gradient * row_weight
    if OPTIMIZER != "adamw":
        g += weight_decay * w
    if OPTIMIZER == "sgd":
        w = w + rate * g
    elif OPTIMIZER == "momentum" or OPTIMIZER == "nesterov":
        velocity = momentum * tl.load(first_ptr + place, mask=inside, other=0.0) + g
        tl.store(first_ptr + place, velocity, mask=inside)
        if OPTIMIZER == "nesterov":
            velocity = g + momentum * velocity
        w = w + rate * velocity
    else:
        mean = tl.load(first_ptr + place, mask=inside, other=0.0)
        mean += new_mean * (g - mean)
        square = beta2 * tl.load(second_ptr + place, mask=inside, other=0.0) + new_square * g * g
        tl.store(first_ptr + place, mean, mask=inside)
        tl.store(second_ptr + place, square, mask=inside)
        if OPTIMIZER == "adamw":
            w = w * decay
        w = w + rate * (mean / (tl.sqrt(square) * inverse_root + eps))
    return w
