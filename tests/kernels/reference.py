"""The dropout mask of the kernels in PyTorch ops, and poisoned outputs."""

from __future__ import annotations

import torch

from onelaunch.integers import ceil_div
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.rng import MASK32, keep_threshold, philox

STREAM_TAG = 0x6F6C0001
KEY = DropoutKey(None, -(2**62) - 5, 2**33 + 12)


def keep_mask(lines: int, inner: int, p: float, key: DropoutKey = KEY) -> torch.Tensor:
    """`[lines, inner]` booleans: 16 bits of Philox(counter = (group, offset), key = seed) against the threshold."""
    groups = ceil_div(inner, 8)
    group = torch.arange(lines * groups)
    offset_low, offset_high = key.offset & MASK32, (key.offset >> 32) ^ STREAM_TAG
    words = philox(
        (group & MASK32, group >> 32, torch.full_like(group, offset_low), torch.full_like(group, offset_high)),
        key.seed % 2**64,
    )
    numbers = []
    for word in words:
        assert isinstance(word, torch.Tensor)
        numbers += [word & 0xFFFF, word >> 16]
    return torch.stack(numbers, -1).reshape(lines, groups * 8)[:, :inner] < keep_threshold(p)


def poisoned(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output that no kernel has written yet: NaN, or 255 in bytes."""
    kind = dtype or like.dtype
    return torch.full(shape, float("nan") if kind.is_floating_point else 255, dtype=kind, device=like.device)


def unpacked(bits: torch.Tensor, inner: int) -> torch.Tensor:
    """The keep mask `[..., inner]`, on the CPU."""
    lane = torch.arange(8, device=bits.device)
    return ((bits[..., None].int() >> lane) & 1).bool().flatten(-2)[..., :inner].cpu()
