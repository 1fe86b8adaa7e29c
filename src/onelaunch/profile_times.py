"""Device times of the operations of one call, from PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def operation_times(run: Callable[[], object]) -> list[float]:
    """Seconds on a CUDA device of each operation or Triton kernel that `run` starts itself, in the order of their launches.

    Operations inside others count with these. The first of two calls warms up.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    run()
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    events = [event for event in profile.events() or () if _is_outermost(event) and event.device_time_total > 0]
    return [event.device_time_total * 1e-6 for event in sorted(events, key=lambda event: event.time_range.start)]


def _is_outermost(event: Any) -> bool:
    """Whether it is an operation, or a launch of Triton's, that no other of these contains."""
    outer = event.cpu_parent
    while outer is not None and not _launches(outer):
        outer = outer.cpu_parent
    return outer is None and _launches(event) and event.device_type == torch.autograd.DeviceType.CPU


def _launches(event: Any) -> bool:
    return "::" in event.name or event.name.startswith("triton_")
