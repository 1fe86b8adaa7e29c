"""Inputs and models of a few lines, which several tests of fusing share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def rows() -> torch.Tensor:
    return torch.randn(9, 12, dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


@dataclass
class Found:
    main: torch.Tensor
    aux: torch.Tensor | None = None


class Backbone(Layer):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        h = super().forward(x)
        if x.isnan().any():
            raise ValueError(x)
        match self.kind:
            case "dataclass":
                return Found(h)
            case "dict":
                return {"main": h, "aux": None}
        return h, None
