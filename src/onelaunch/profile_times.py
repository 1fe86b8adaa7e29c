"""Device times of the operations of one call of a compiled function, from PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

REGION = "## Call CompiledFxGraph"  # what Inductor calls the run of a compiled graph, forward or backward


def operation_times(run: Callable[[], object]) -> list[float]:
    """Seconds on a CUDA device of each operation or Triton kernel in the compiled graphs that `run` calls, in their order.

    Operations inside others count with these, and those between compiled graphs do not count. The first of two calls warms up.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # without, it warns about cycles
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if in_graph(event) and event.device_time_total > 0]
    return [event.device_time_total * 1e-6 for event in sorted(events, key=lambda event: event.time_range.start)]


def in_graph(event: Any) -> bool:
    """Whether a compiled graph starts this operation or launch itself, not inside another one."""
    outer = event.cpu_parent
    while outer is not None and not outer.name.startswith(REGION):
        if _launches(outer):
            return False
        outer = outer.cpu_parent
    return outer is not None and _launches(event) and event.device_type == torch.autograd.DeviceType.CPU


def _launches(event: Any) -> bool:
    return "::" in event.name or event.name.startswith("triton_")
