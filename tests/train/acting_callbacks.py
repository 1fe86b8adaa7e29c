"""What callbacks do to the model of a run in tests, and the run: five epochs of five steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import onelaunch as ol
from tests.reference import OPTIMIZERS, problem

Change = Callable[[nn.Sequential], Any]


def network(device: torch.device | str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)
    ).to(device)  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return problem("cross_entropy")


def halve(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def halve_data(model: nn.Sequential) -> None:
    model[3].weight.data *= 0.5  # without a new version


def zero_in_other_memory(model: nn.Sequential) -> None:
    model[6].weight.data = torch.zeros_like(model[6].weight)


def freeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def drop_more(model: nn.Sequential) -> None:
    model[2].p = 0.9


def another_activation(model: nn.Sequential) -> None:
    model[1] = nn.GELU()


def another_layer(model: nn.Sequential) -> None:
    torch.manual_seed(5)
    model[3] = nn.Linear(16, 8).to(model[0].weight.device)


def another_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().flip(0) / 2)


def wider(model: nn.Sequential) -> None:
    torch.manual_seed(5)
    device = model[0].weight.device
    model[0], model[3] = nn.Linear(7, 24).to(device), nn.Linear(24, 8).to(device)


def hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, output: output / 2)


def larger_eps(model: nn.Sequential) -> None:
    model[4].eps = 0.1


def class_of_a_layer(model: nn.Sequential) -> None:
    model[1].__class__ = nn.Tanh


CHANGES: dict[str, Change] = {
    change.__name__: change
    for change in (
        halve, halve_data, zero_in_other_memory, freeze, drop_more, another_activation, another_layer, another_parameter,
        wider, hook, larger_eps, class_of_a_layer,
    )
}  # fmt: skip


def at_epoch(number: int, change: Change, model: nn.Sequential) -> Callable[[ol.History], None]:
    """A callback that changes the model after this epoch, counted from 1."""
    return lambda history: change(model) if len(history.epochs) == number else None


def run(model: nn.Sequential, *callbacks: Callable[[ol.History], Any], **options: Any) -> ol.History:
    x, y = data()
    optimizer = {} if "optimizer" in options else OPTIMIZERS["sgd-nesterov"]
    defaults = {"epochs": 5, "progress": False, "validation": (x, y), "callbacks": callbacks, **optimizer}
    return ol.fit(model, x, y, **{**defaults, **options})
