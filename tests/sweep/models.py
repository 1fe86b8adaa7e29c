"""What the tests of sweeps share: small data, and functions that make models."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

ROWS = 90


def make_model(width: int = 8, dropout: float = 0.0, norm: bool = False) -> nn.Module:
    layers = [nn.Linear(5, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def rows(count: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.standard_normal((count, 5)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
