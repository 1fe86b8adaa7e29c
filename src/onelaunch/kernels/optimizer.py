"""SGD, Adam and AdamW on a tile of weights that is in registers anyway: the update as a GEMM's epilogue.

The gradient arrives as it was summed and never reaches memory; weights and optimizer state are read and written once.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from onelaunch.kernels.run_state import hyper, scalar


@triton.jit
def updated(w, gradient, first_ptr, second_ptr, inside, table_ptr, index, OPTIMIZER: tl.constexpr):
    """The weights after the step, from the gradient of the batch's summed loss; writes the state that the pointers name.

    `first_ptr` is the momentum or Adam's mean, None for plain SGD; `second_ptr` Adam's mean of squares. OPTIMIZER is one of
    "sgd", "momentum", "nesterov", "adam", "adamw".
    """
    g = gradient * scalar(table_ptr, index, 0)
    rate = scalar(table_ptr, index, 1)
    if OPTIMIZER != "adamw":
        g += hyper(table_ptr, 1) * w
    if OPTIMIZER == "sgd":
        w = w + rate * g
    elif OPTIMIZER == "momentum" or OPTIMIZER == "nesterov":
        momentum = hyper(table_ptr, 0)
        velocity = momentum * tl.load(first_ptr, mask=inside, other=0.0) + g
        tl.store(first_ptr, velocity, mask=inside)
        if OPTIMIZER == "nesterov":
            velocity = g + momentum * velocity
        w = w + rate * velocity
    else:
        mean = tl.load(first_ptr, mask=inside, other=0.0)
        mean += hyper(table_ptr, 2) * (g - mean)
        square = hyper(table_ptr, 3) * tl.load(second_ptr, mask=inside, other=0.0) + hyper(table_ptr, 4) * g * g
        tl.store(first_ptr, mean, mask=inside)
        tl.store(second_ptr, square, mask=inside)
        if OPTIMIZER == "adamw":
            w = w * scalar(table_ptr, index, 3)
        w = w + rate * (mean / (tl.sqrt(square) * scalar(table_ptr, index, 2) + hyper(table_ptr, 5)))
    return w
