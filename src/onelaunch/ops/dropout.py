"""Dropout keys, and dropout masks in PyTorch ops for the CPU path."""

from __future__ import annotations

import torch
from torch import Tensor

from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.rng import signed_seed

# PyTorch counts its Philox offset in units of four words per thread; one call of our kernels takes one unit.
OFFSET_STEP = 4


def draw_key(device: torch.device) -> DropoutKey:
    """A new key from the device's default generator, so that `torch.manual_seed` and checkpointing determine it.

    While a CUDA graph is captured, the key is drawn into device memory: each replay draws a new one.
    """
    if torch.cuda.is_current_stream_capturing():
        return DropoutKey(torch.randint(-(2**63), 2**63 - 1, (2,), device=device), 0, 0)
    generator = torch.cuda.default_generators[device.index]
    offset = generator.get_offset()
    generator.set_offset(offset + OFFSET_STEP)
    seed = generator.initial_seed()
    return DropoutKey(None, signed_seed(seed), offset)


def draw_keep(like: Tensor, p: float) -> Tensor:
    """A boolean keep mask from the default generator of the tensor's device."""
    return torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - p)


def bytes_for(lines: int, inner: int) -> tuple[int, int]:
    """Shape of the keep bits for `lines` rows of `inner` elements."""
    return lines, (inner + 7) // 8  # not ceil_div: torch.compile traces it with symbolic sizes


def pack(keep: Tensor) -> Tensor:
    """Booleans `[..., n]` -> bytes `[..., ceil(n / 8)]`, the first element in the lowest bit."""
    _, groups = bytes_for(1, keep.shape[-1])
    padded = torch.nn.functional.pad(keep.to(torch.uint8), (0, groups * 8 - keep.shape[-1]))
    lane = torch.arange(8, dtype=torch.uint8, device=keep.device)
    return (padded.unflatten(-1, (groups, 8)) << lane).sum(-1, dtype=torch.uint8)


def unpack(bits: Tensor, n: int) -> Tensor:
    """The booleans `[..., n]` that were packed into `bits`: the inverse of `pack`."""
    lane = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(-1) >> lane) & 1).bool().flatten(-2)[..., :n]
