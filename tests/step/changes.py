"""A network and changes of it, each of which a recorded step must notice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.utils.prune
from torch import Tensor, nn


class Scale(nn.Module):
    factor = other_factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.limit = 1.0, math.nan
        self.calls: Any = None
        self.temperature: Any = np.float32(1.0)
        self.created: Any = None
        self.mean, self.function = torch.zeros(()), torch.relu
        self.more = nn.ModuleList()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = len(x)
        if self.created is None:
            self.created = 1.0
        for layer in self.more:
            x = layer(x)
        x = x if math.isnan(self.limit) else x.clamp(-self.limit, self.limit)
        x = x / float(self.temperature)
        return self.function(x) * (self.factor * self.other_factor * self.created) + (self.shift - self.mean)


def network(frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), Scale(), nn.Linear(16, 4))
    model[0].requires_grad_(not frozen)
    model[4].gain = 1.0
    return model


def move(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.5


def set_factor(model: Any) -> None:
    model[3].factor = 0.3


def append_layer(model: Any) -> None:
    model[3].more.append(nn.Tanh())


def swap_weights(model: Any) -> None:
    model[0].weight, model[0].bias = (nn.Parameter(one.detach() / 2) for one in (model[0].weight, model[0].bias))


def prune(model: Any) -> None:
    nn.utils.prune.custom_from_mask(model[4], "weight", torch.ones_like(model[4].weight).tril())


def set_shift(model: Any) -> None:
    model[3].shift = torch.full_like(model[3].shift, 0.5)


def replace_activation_and_change_it(model: Any) -> None:
    """The second change is one of a layer that was not there."""
    if isinstance(model[2], nn.LeakyReLU):
        model[2].negative_slope = 0.9
    else:
        model[2] = nn.LeakyReLU(0.2)


def replace_tanh(model: Any) -> None:
    model[2] = nn.ReLU()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "freeze": lambda model: model[0].requires_grad_(False),
    "evaluate a layer": lambda model: model[1].eval(),
    "a factor": set_factor,
    "a number of NumPy": lambda model: setattr(model[3], "temperature", np.float32(0.5)),
    "a setting of PyTorch's layer": lambda model: setattr(model[1], "momentum", 0.9),
    "a buffer in another place": set_shift,
    "memory of a parameter": lambda model: move(model[0].weight),
    "a layer": replace_tanh,
    "a layer in an empty list": append_layer,
    "a default of the class": lambda model: setattr(model[3], "other_factor", 0.5),
    "an attribute that forward created": lambda model: setattr(model[3], "created", 0.5),
    "an attribute that was no number": lambda model: setattr(model[3], "limit", 0.1),
    "an attribute that is a tensor": lambda model: setattr(model[3], "mean", torch.ones(())),
    "an attribute that is a function": lambda model: setattr(model[3], "function", torch.tanh),
    "an attribute of a linear layer": lambda model: setattr(model[4], "gain", 0.1),
    "no bias": lambda model: setattr(model[4], "bias", None),
    "other parameters": swap_weights,
    "a pruned layer": prune,
}
