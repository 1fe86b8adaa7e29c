"""The dropout key: a mask is a function of it and of the element's number. The ops import this file without Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DropoutKey(NamedTuple):
    """Seed and offset by value or, while a CUDA graph is captured, two int64 in device memory that each replay draws anew."""

    memory: torch.Tensor | None
    seed: int
    offset: int


NO_KEY = DropoutKey(None, 0, 0)
