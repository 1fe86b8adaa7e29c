"""An fp32 weight in two halves of 16 bits, without loss: the bf16 nearest to it, all that products read, and the rest.

    high = (bits + 0x8000) >> 16        low = bits & 0xFFFF        bits = (high << 16) + low, low taken as signed

A tie rounds away from zero, where bf16's own rounding takes the even one: only so does each pair stand for one number. The one
exception is NaN, whose largest patterns would round to -0: all NaN become one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.kernels.launch import cdiv, launch

BLOCK = 4096


@triton.jit
def joined(high, low):
    """The fp32 weights of these halves; `high` itself where there is no low half, since it is the whole weight then."""
    whole = high
    if low is not None:
        bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32)
        whole = bits.to(tl.float32, bitcast=True)
    return whole


@triton.jit
def halved(w):
    bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
    high = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, bits.to(tl.int16)


@triton.jit
def load_low(low_ptr, place, inside):
    low = None
    if low_ptr is not None:
        low = tl.load(low_ptr + place, mask=inside, other=0, cache_modifier=".cg")
    return low


@triton.jit
def store_weights(w, w_ptr, low_ptr, place, inside):
    if low_ptr is None:
        tl.store(w_ptr + place, w, mask=inside)
    else:
        high, low = halved(w)
        tl.store(w_ptr + place, high, mask=inside)
        tl.store(low_ptr + place, low, mask=inside)


@triton.jit
def split_kernel(w_ptr, high_ptr, low_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    store_weights(tl.load(w_ptr + place, mask=inside, other=0.0), high_ptr, low_ptr, place, inside)


@triton.jit
def join_kernel(w_ptr, high_ptr, low_ptr, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    high = tl.load(high_ptr + place, mask=inside, other=0.0)
    w = joined(high, tl.load(low_ptr + place, mask=inside, other=0))
    tl.store(w_ptr + place, w, mask=inside)


def split_weights(weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Fills high (bf16) and low (int16) from weight (fp32); all contiguous."""
    _each(split_kernel, weight, high, low)


def join_weights(weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Fills weight from its halves."""
    _each(join_kernel, weight, high, low)


def _each(kernel: object, weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    count = weight.numel()
    launch(kernel, (cdiv(count, BLOCK),), (weight, high, low), (), (count,), (BLOCK,))
