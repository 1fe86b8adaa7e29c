"""The learning rate of every step, as plain arithmetic that each engine can compute on its own device.

The schedules are PyTorch's schedulers, stepped once per batch over the whole run (`total` steps, counted from 0):
  constant   lr
  linear     LinearLR(start_factor=1, end_factor=0, total_iters=total):  lr * (1 - step / total)
  cosine     CosineAnnealingLR(T_max=total):                             lr * (1 + cos(pi * step / total)) / 2
  one_cycle  OneCycleLR(max_lr=lr, total_steps=total, cycle_momentum=False): from lr / 25 up to lr over the first 30 %,
             then down to lr / 250,000, both along a half cosine. Fewer than MIN_ONE_CYCLE_STEPS steps leave no room for a
             warm-up, and would be spent at the final rate (a run of one step: at lr / 250,000): they follow "cosine", where
             every step trains and the first one has the rate lr.
"""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine", "one_cycle")
WARM_UP = 0.3  # fraction of the steps
START_DIVISOR = 25.0
FINAL_DIVISOR = 1e4  # the last rate is the first one divided by this
MIN_ONE_CYCLE_STEPS = 4  # the fewest steps of which the warm-up has a whole one; OneCycleLR fails below


def learning_rate(schedule: str, lr: float, step: int, total: int) -> float:
    """The learning rate of step `step` of `total`, where `lr` is that of the constant schedule or the peak."""
    match schedule:
        case "constant":
            return lr
        case "linear":
            return lr * (1 - step / total)
        case "one_cycle" if total >= MIN_ONE_CYCLE_STEPS:
            return _one_cycle(lr, step, total)
        case "cosine" | "one_cycle":
            return lr * (1 + math.cos(math.pi * step / total)) / 2
    raise AssertionError(schedule)


def _one_cycle(lr: float, step: int, total: int) -> float:
    start, peak_step, last_step = lr / START_DIVISOR, WARM_UP * total - 1, total - 1
    if step <= peak_step:
        return _half_cosine(start, lr, step / peak_step if peak_step else 0.0)
    return _half_cosine(lr, start / FINAL_DIVISOR, (step - peak_step) / (last_step - peak_step))


def _half_cosine(begin: float, end: float, fraction: float) -> float:
    return end + (begin - end) / 2 * (1 + math.cos(math.pi * fraction))
