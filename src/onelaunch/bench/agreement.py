"""Whether two loss curves agree: means over stretches of steps, their relative gap, and a bound for it.

Runs with the same weights and rows still drift apart: dropout masks come from different generators, and rounding errors grow.
The effect of such noise on the mean of a stretch is estimated from the step-by-step differences within the stretch, so that
the bound needs no tuning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
STRETCHES, MIN_STEPS = 20, 10
SLACK = 0.02  # what rounding to bf16 does to a mean
STANDARD_ERRORS = 4  # honest pairs (MNIST, 3 epochs, other dropout masks) came to 0.6 of the bound at most


@dataclass(frozen=True)
class Gap:
    """The widest gap between two curves, relative to the first; where they disagree, the gap furthest beyond its bound."""

    relative: float
    bound: float
    first_step: int
    last_step: int
    agrees: bool


def widest_gap(reference: Sequence[float], other: Sequence[float]) -> Gap:
    """Compare two curves of the same length, one loss per step."""
    a, b = np.asarray(reference, np.float64), np.asarray(other, np.float64)
    assert a.shape == b.shape, (a.shape, b.shape)
    length = min(len(a), max(MIN_STEPS, len(a) // STRETCHES))
    gaps = []
    for first in range(0, len(a) - length + 1, length):
        last = first + length if first + 2 * length <= len(a) else len(a)  # the last stretch takes the rest
        gaps.append(_gap(a[first:last], b[first:last], first))
    disagreeing = [gap for gap in gaps if not gap.agrees]
    if disagreeing:
        return max(disagreeing, key=lambda gap: gap.relative / gap.bound)
    return max(gaps, key=lambda gap: gap.relative)


def _gap(a: Floats, b: Floats, first: int) -> Gap:
    scale = max(abs(float(a.mean())), float(np.finfo(np.float32).tiny))
    relative = abs(float(b.mean() - a.mean())) / scale
    error = float((b - a).std(ddof=1)) / math.sqrt(len(a)) / scale if len(a) > 1 else 0.0
    bound = SLACK + STANDARD_ERRORS * error
    return Gap(relative, bound, first, first + len(a) - 1, bool(relative <= bound))  # NaN agrees with nothing
