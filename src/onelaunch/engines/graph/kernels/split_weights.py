"""fp32 weights split without loss into two 16-bit words: `high`, the nearest bf16, which is all that products read, and `low`.

    high = (bits + 0x8000) >> 16        low = bits & 0xFFFF        bits = (high << 16) + low, with low as a signed number

A tie rounds away from zero, where bf16's own rounding takes the even neighbour: otherwise a pair would stand for two numbers.
The exception is NaN, whose largest bit patterns would round to -0: all NaN become one pattern.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div
from onelaunch.kernels.launch import launch

BLOCK = 4096


@triton.jit
def join_words(high, low):
    """The fp32 weights of these words; `high` itself where `low` is None, since it is the whole weight then."""
    whole = high
    if low is not None:
        bits = (high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low.to(tl.int32)
        whole = bits.to(tl.float32, bitcast=True)
    return whole


@triton.jit
def split_words(w):
    """(high, low) of fp32 weights."""
    bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
    high = ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, bits.to(tl.int16)


@triton.jit
def load_low(low_ptr, offset, inside):
    low = None
    if low_ptr is not None:
        low = tl.load(low_ptr + offset, mask=inside, other=0, cache_modifier=".cg")
    return low


@triton.jit
def store_weights(w, w_ptr, low_ptr, offset, inside):
    if low_ptr is None:
        tl.store(w_ptr + offset, w, mask=inside)
    else:
        high, low = split_words(w)
        tl.store(w_ptr + offset, high, mask=inside)
        tl.store(low_ptr + offset, low, mask=inside)


@triton.jit
def split_kernel(w_ptr, high_ptr, low_ptr, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    store_weights(tl.load(w_ptr + offset, mask=inside, other=0.0), high_ptr, low_ptr, offset, inside)


@triton.jit
def join_kernel(w_ptr, high_ptr, low_ptr, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    high = tl.load(high_ptr + offset, mask=inside, other=0.0)
    w = join_words(high, tl.load(low_ptr + offset, mask=inside, other=0))
    tl.store(w_ptr + offset, w, mask=inside)


def split_weights(weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Fills high (bf16) and low (int16) from weight (fp32); all contiguous."""
    _launch(split_kernel, weight, high, low)


def join_weights(weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Fills weight (fp32) from high and low."""
    _launch(join_kernel, weight, high, low)


def _launch(kernel: object, weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    count = weight.numel()
    launch(kernel, (ceil_div(count, BLOCK),), (weight, high, low), (), (count,), (BLOCK,))
