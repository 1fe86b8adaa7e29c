"""A small run that tests stop, resume and compare: six epochs of five steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import onelaunch as ol
from tests.reference import OPTIMIZERS, problem


def network(device: torch.device | str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
    ).to(device)  # fmt: skip


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return problem("cross_entropy")


def run(model, **options):
    x, y = data()
    optimizer = {} if "optimizer" in options else OPTIMIZERS["sgd-momentum"]
    defaults = {"epochs": 6, "engine": "eager", "progress": False, "validation": (x, y), **optimizer}
    return ol.fit(model, x, y, **{**defaults, **options})


def train_for_long(checkpoint: Path) -> None:
    """For a process that will be killed."""
    run(network(), epochs=100_000, checkpoint=checkpoint)


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
