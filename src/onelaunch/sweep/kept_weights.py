"""The weights of finished members, as many as fit into a bounded amount of memory; those of the best stay longest."""

from __future__ import annotations

import math

import torch
from torch import nn

from onelaunch.run.metric_names import is_loss

MAX_KEPT_BYTES = 2**29
State = dict[str, torch.Tensor]


def weights_of(model: nn.Module) -> State:
    """Copies of the model's parameters and buffers, on the CPU."""
    return {
        name: tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


class KeptWeights:
    def __init__(self, metric: str, limit: int = MAX_KEPT_BYTES) -> None:
        self._sign = 1.0 if is_loss(metric) else -1.0
        self._limit, self._bytes = limit, 0
        self._found: dict[int, tuple[float, State]] = {}

    def add(self, index: int, value: float, weights: State) -> None:
        """Keep the weights of a member whose metric is `value`. Where they do not fit, those of the worse half are dropped."""
        self.drop(index)
        self._found[index] = (math.inf if math.isnan(value) else self._sign * value), weights
        self._bytes += _bytes(weights)
        while self._bytes > self._limit and len(self._found) > 1:
            ordered = sorted(self._found, key=lambda index: self._found[index][0])
            for worse in ordered[(len(ordered) + 1) // 2 :]:
                self.drop(worse)

    def drop(self, index: int) -> None:
        if index in self._found:
            self._bytes -= _bytes(self._found.pop(index)[1])

    def get(self, index: int) -> State | None:
        found = self._found.get(index)
        return None if found is None else found[1]


def _bytes(weights: State) -> int:
    return sum(tensor.nbytes for tensor in weights.values())
