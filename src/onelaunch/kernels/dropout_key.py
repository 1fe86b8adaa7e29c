"""The dropout key: what a mask is a function of, besides the element. No Triton here: the ops import this at once."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DropoutKey(NamedTuple):
    """Seed and offset by value, or, while a CUDA graph is captured, two int64 in device memory that a replay draws anew."""

    memory: torch.Tensor | None
    seed: int
    offset: int


NO_KEY = DropoutKey(None, 0, 0)
