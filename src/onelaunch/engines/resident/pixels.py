"""Floats that are whole 255ths, as images come out of `ToTensor` and zeros and ones are: taken as the bytes they were.

uint8 rows mean value / 255 to every engine, so the run is the same to the last bit of its inputs, and a row takes a quarter of
the room and of the way.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from onelaunch.engines.contract import Run

FIRST_ROWS = 64  # looked at before all
AT_ONCE = 2**26  # numbers: what is made on the way takes little room beside x


def in_bytes(run: Run) -> Run:
    """The run with rows of bytes, where all its rows can be that; else the run as it is."""
    x = bytes_of(run.x)
    if x is None:
        return run
    if run.validation is None:
        return replace(run, x=x)
    check = bytes_of(run.validation[0])
    return run if check is None else replace(run, x=x, validation=(check, run.validation[1]))


def bytes_of(x: torch.Tensor) -> torch.Tensor | None:
    """uint8 numbers whose 255ths are x exactly, as float32 division gives them; None where there are none, or no room."""
    if x.dtype != torch.float32 or _bytes(x[:FIRST_ROWS]) is None:
        return None
    found = []
    try:
        for part in x.split(max(1, AT_ONCE // max(1, x[0].numel()))):
            if (numbers := _bytes(part)) is None:
                return None
            found.append(numbers)
        return torch.cat(found)
    except torch.OutOfMemoryError:
        return None


def _bytes(x: torch.Tensor) -> torch.Tensor | None:
    found = (x * 255).round_().clamp_(0, 255).to(torch.uint8)  # whatever becomes of a NaN, it is no byte's 255th
    return found if torch.equal(found.to(torch.float32).div_(255), x) else None
