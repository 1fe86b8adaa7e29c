"""What one forward pass tells about a run: whether it can be compiled with our masks, and whether compiling pays.

The estimate is a fixed function of the run, not a measurement, so that the same run always takes the same engine.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils.flop_counter import FlopCounterMode

from onelaunch.engines.contract import Run
from onelaunch.format import format_seconds
from onelaunch.run.dropouts import dropout_modules
from onelaunch.run.objective import own_features
from onelaunch.trial_runs import evaluation

COMPILE_SECONDS = 20.0  # of a ResNet-18 on an H200's host; the second time, from PyTorch's caches, a quarter
FLOPS_PER_SECOND = 3e13  # of an eager step of convolutions
STEP_SECONDS = 1e-4  # of an eager captured step with almost no arithmetic
SAVED = 0.3  # of a step's time
PROBED_ROWS = 8


def probe_reason(run: Run) -> str:
    """Why the run should not be compiled; empty where it should. Only engine="auto" asks whether it pays."""
    calls: Counter[torch.nn.Module] = Counter()
    flops = _flops_per_row(run, calls)
    if any(count > 1 for count in calls.values()):
        return "a dropout module is called several times per step, and its masks would repeat"
    step_seconds = STEP_SECONDS + 3 * flops * run.spec.batch_size / FLOPS_PER_SECOND
    saved = SAVED * step_seconds * run.spec.total_steps
    if saved > COMPILE_SECONDS or run.spec.engine != "auto":
        return ""
    steps = f"{run.spec.total_steps:,} steps"
    return f"compiling takes longer than the {format_seconds(saved)} it would save in {steps}; pass engine='compiled'"


def _flops_per_row(run: Run, calls: Counter[torch.nn.Module]) -> float:
    """Floating-point operations of the forward pass per row, and the calls of each dropout module, on a few rows."""
    dtype = next(run.model.parameters()).dtype
    rows = [own_features(one[:PROBED_ROWS], dtype) for one in (run.x, *run.more_x)]
    counter = FlopCounterMode(display=False)
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: calls.update([module]))
        for module in dropout_modules(run.model)
    ]
    try:
        with evaluation(run.model), counter:
            run.model(*rows)
    finally:
        for hook in hooks:
            hook.remove()
    return counter.get_total_flops() / len(rows[0])
