"""A step of any nn.Module as a CUDA graph: what the eager engine does, launched as a whole.

PyTorch runs the step once while a graph records it; a replay then does the same work in the memory of the capture, with nothing
from Python and no allocation. What changes from step to step is read from the device: which rows, the learning rate, the
dropout step. Models that must not be frozen so are found out first, and keep being run operation by operation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onelaunch.capture import capturing
from onelaunch.rng import numpy_random_state

StepBody = Callable[[torch.Tensor], None]  # of the device's clock: (place in the epoch, step of the run)


class Clock:
    """Where the run is, on the device: the place of the next step in its epoch, and its number."""

    def __init__(self, device: torch.device) -> None:
        self.state = torch.zeros(2, dtype=torch.int64, device=device)

    def set(self, place: int, step: int) -> None:
        self.state.copy_(torch.tensor([place, step]))


def capture(body: StepBody, clock: Clock) -> torch.cuda.CUDAGraph:
    """Record `body`, which reads the clock, and the clock's tick. Raises what PyTorch raises where that cannot be."""
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        body(clock.state)
        clock.state.add_(1)
    return graph


class Witness:
    """Looks for state that a graph would freeze: generators on the host, and attributes of modules that change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before = self._look()

    def _look(self) -> dict[str, Any]:
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

    def complaint(self) -> str:
        """What moved since the start, in words; empty when nothing did."""
        now = self._look()
        for what in self._before.keys() | now.keys():
            if self._before.get(what) != now.get(what):
                return f"{what} changes from step to step"
        return ""
