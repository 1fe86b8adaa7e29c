"""Float rows that are whole multiples of 1/255 (images from `ToTensor`, zeros and ones) are converted to uint8 rows.

uint8 rows mean value / 255 to every engine, so the inputs are the same to the last bit, and a row takes a quarter of the memory
and of the bandwidth.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from onelaunch.engines.contract import Run

FIRST_ROWS = 64  # checked before the others
NUMBERS_AT_ONCE = 2**26  # so that temporary tensors are small beside x


def with_uint8_rows(run: Run) -> Run:
    """The run with uint8 rows, where both x and the validation rows can be converted; else the run itself."""
    x = as_uint8(run.x)
    if x is None:
        return run
    if run.validation is None:
        return replace(run, x=x)
    validation_x = as_uint8(run.validation[0])
    return run if validation_x is None else replace(run, x=x, validation=(validation_x, run.validation[1]))


def as_uint8(x: torch.Tensor) -> torch.Tensor | None:
    """The uint8 tensor u for which u / 255 in float32 is exactly x; None where there is none, or no memory for it."""
    if x.dtype != torch.float32 or _as_uint8(x[:FIRST_ROWS]) is None:
        return None
    parts = []
    try:
        for rows in x.split(max(1, NUMBERS_AT_ONCE // max(1, x[0].numel()))):
            if (part := _as_uint8(rows)) is None:
                return None
            parts.append(part)
        return torch.cat(parts)
    except torch.OutOfMemoryError:
        return None


def _as_uint8(x: torch.Tensor) -> torch.Tensor | None:
    found = (x * 255).round_().clamp_(0, 255).to(torch.uint8)  # a NaN becomes any byte, and fails the comparison
    return found if torch.equal(found.to(torch.float32).div_(255), x) else None
