"""The type in which the ops sum and take derivatives."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(tensor: Tensor) -> Tensor:
    """`tensor` in float64 if it is float64, else in float32: 16-bit types lose digits in sums, and overflow."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
