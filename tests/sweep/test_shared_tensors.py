"""Models of a sweep that share tensors: refused where training changes them, as it would change the other members."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from tests.sweep.models import rows, same_weights

X, Y = rows()
OPTIONS: dict[str, Any] = {"grid": {"lr": [1e-3, 1e-2]}, "epochs": 1, "progress": False}


class Counts(nn.Module):
    """Passes its input on; in training its buffer counts the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("batches", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.batches += 1
        return x


class Scaled(nn.Module):
    """A frozen layer and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4).requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


@pytest.mark.parametrize(
    ("backbone", "name", "n_jobs"),
    [
        (nn.Linear(5, 4), "0.weight", None),
        (nn.Linear(5, 4), "0.weight", 2),
        (nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)).requires_grad_(False), "0.1.running_mean", None),
        (nn.Sequential(Counts(), nn.Linear(5, 4).requires_grad_(False)), "0.0.batches", None),
    ],
    ids=["parameters", "parameters-elsewhere", "statistics", "buffers"],
)
def test_a_backbone_that_training_changes_cannot_be_shared(backbone, name, n_jobs):
    def make() -> nn.Module:
        return nn.Sequential(backbone, nn.ReLU(), nn.Linear(4, 3))

    remedy = "make a new one in each call, or share frozen modules only"
    with pytest.raises(ol.OnelaunchError, match=f"share {name}, which training changes: {remedy}") as caught:
        ol.sweep(make, X, Y, n_jobs=n_jobs, **OPTIONS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strategy", ["grid", "halving"])
def test_a_frozen_backbone_may_be_shared(strategy):
    shared = Scaled()

    def make() -> nn.Module:
        return nn.Sequential(shared, nn.ReLU(), nn.Linear(4, 3))

    result = ol.sweep(make, X, Y, strategy=strategy, validation=0.2, **OPTIONS)
    assert not result.failures
    assert not same_weights(result.model(0), result.model(1))
