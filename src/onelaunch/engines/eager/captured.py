"""A training step of any nn.Module as a CUDA graph: the work of the eager engine in one launch.

PyTorch runs the step once while a graph records it. A replay then does the same work in the memory of the capture, without
Python and without allocation. It reads from the device what changes from step to step: row indices, learning rate, dropout
step. A model with state that a graph would freeze is found first, and keeps running operation by operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onelaunch.capture import capturing
from onelaunch.rng import numpy_random_state


def capture(body: Callable[[torch.Tensor], None], clock: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of `body(clock)` and of the clock's increment. PyTorch's errors in a capture pass through.

    The clock is the position of the run, on the device: the index of the next step in its epoch, and its number in the run.
    """
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        body(clock)
        clock.add_(1)
    return graph


class HostState:
    """State that a graph would freeze: generators on the host, and attributes of modules that change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before = self._read()

    def _read(self) -> dict[str, Any]:
        seen: dict[str, Any] = {
            "Python's random": random.getstate(),
            "NumPy's random": numpy_random_state(),
            "PyTorch's CPU generator": torch.get_rng_state().numpy().tobytes(),
        }
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, bool | int | float | str | tuple):
                    seen[f"{path or 'the model'}.{name}"] = value
        return seen

    def uncapturable_reason(self) -> str:
        """What has changed since the start, in words; empty when nothing has."""
        now = self._read()
        for what in self._before.keys() | now.keys():
            if self._before.get(what) != now.get(what):
                return f"{what} changes from step to step"
        return ""
