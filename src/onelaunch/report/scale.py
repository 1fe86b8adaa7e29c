"""From values to coordinates: linear and logarithmic axes with ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from onelaunch.integers import ceil_div

WIDE = 4  # largest value divided by smallest: beyond it a logarithmic axis shows more
MIN_SPAN = 1e-3  # of a linear axis, relative to its values, so that five digits tell its ticks apart


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] onto [start, end]."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = math.log10(max(value, self.low)), math.log10(low), math.log10(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        return _log_ticks(self.low, self.high, most) if self.log else _linear_ticks(self.low, self.high, most)


def fitted(values: Iterable[float], start: float, end: float, *, log: bool = False, from_zero: bool = False) -> Scale:
    """A scale that holds all finite `values`; a logarithmic one leaves out those that are not positive."""
    known = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    if from_zero:
        low = min(low, 0.0)
    if log:
        low, high = low / 1.12, high * 1.12
        if high / low < 1.5:
            low, high = low / 1.5, high * 1.5
    else:
        finest = MIN_SPAN * max(abs(low), abs(high)) / 2
        margin = max((high - low) * 0.04, finest) if high > low else abs(high) * 0.1 or 1.0
        low, high = low if from_zero and low == 0 else low - margin, high + margin
    return Scale(low, high, start, end, log)


def is_wide(values: Iterable[float]) -> bool:
    """Whether a logarithmic axis suits the values: all are positive, and the largest is over WIDE times the smallest."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and min(known) > 0 and max(known) > WIDE * min(known)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    if high / low < 5:  # too narrow for powers of ten and their steps
        return _linear_ticks(low, high, most)
    for factors in ((1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= most:
            break
    if len(found) > most:
        found = found[:: ceil_div(len(found), most)]
    return found if len(found) > 1 else [low, high]
