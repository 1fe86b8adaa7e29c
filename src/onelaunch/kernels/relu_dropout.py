"""ReLU and dropout in one pass: 2 + 1/32 passes over memory forward, 2 + 1/32 backward (fp32).

Forward saves one bit per element, `keep = kept by dropout and x > 0`. Backward needs nothing else, so that neither the input,
nor the output, nor a float mask stays alive for it.

The mask is a function of (seed, offset, element) only: it does not change with the tile shape, autotuning or replay. One
Philox call yields 4 x 32 bits for 8 elements with 16 bits each, so that p is exact to 1/65536.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import load_key, relu_and_drop, unpack_bits
from onelaunch.rng import keep_scale, keep_threshold

GROUP = 8  # elements that share one Philox call and one byte of keep bits
# (groups per program, warps), measured on an H200 over 50 * 2**20 elements; one or two 16-byte loads per thread are best.
FORWARD_TILE = {4: (128, 2), 2: (128, 2)}  # by element size
BACKWARD_TILE = {4: (64, 1), 2: (128, 4)}


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def relu_dropout_forward_kernel(
    x_ptr,
    y_ptr,
    keep_ptr,
    key_ptr,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
    scale,
    n,
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """`WHOLE`: every tile is full, so that no mask is needed."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    element = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = (element < n) | WHOLE

    x = tl.load(x_ptr + element, mask=inside, other=0.0).to(tl.float32)
    seed, offset = load_key(key_ptr, seed, offset)  # after the load of x is issued
    y, bits = relu_and_drop(x * scale, seed, offset, group, threshold, y_ptr.dtype.element_ty)

    tl.store(y_ptr + element, y, mask=inside)
    if keep_ptr is not None:
        tl.store(keep_ptr + group, bits, mask=(group * 8 < n) | WHOLE)


@triton.jit
def relu_dropout_backward_kernel(dy_ptr, keep_ptr, dx_ptr, scale, n, GROUPS: tl.constexpr, WHOLE: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    element = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = (element < n) | WHOLE

    keep = unpack_bits(tl.load(keep_ptr + group, mask=(group * 8 < n) | WHOLE, other=0))
    dy = tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + element, tl.where(keep, dy * scale, 0.0).to(dx_ptr.dtype.element_ty), mask=inside)


def relu_dropout_forward(
    x: torch.Tensor,
    y: torch.Tensor,
    keep: torch.Tensor | None,
    p: float,
    key: DropoutKey,
    tile: tuple[int, int] | None = None,
) -> None:
    """Fill y (may be x) and, for a backward pass, keep, one bit per element. x and y have the same strides and no gaps."""
    n = x.numel()
    if n:
        groups, warps = tile or FORWARD_TILE[x.element_size()]
        launch(
            relu_dropout_forward_kernel,
            (ceil_div(n, GROUP * groups),),
            (x, y, keep, key.memory),
            (key.seed, key.offset, keep_threshold(p), keep_scale(p)),
            (n,),
            (groups, n % (GROUP * groups) == 0),
            num_warps=warps,
        )


def relu_dropout_backward(
    dy: torch.Tensor, keep: torch.Tensor, dx: torch.Tensor, p: float, tile: tuple[int, int] | None = None
) -> None:
    """Fill dx (may be dy), which has the strides of dy and no gaps."""
    n = dy.numel()
    if n:
        groups, warps = tile or BACKWARD_TILE[dy.element_size()]
        launch(
            relu_dropout_backward_kernel,
            (ceil_div(n, GROUP * groups),),
            (dy, keep, dx),
            (keep_scale(p),),
            (n,),
            (groups, n % (GROUP * groups) == 0),
            num_warps=warps,
        )
