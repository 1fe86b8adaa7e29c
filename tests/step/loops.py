"""A small network, batches for it, and the plain loop that a training step is compared with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def network(device: str = "cpu", dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 4)).to(device)


def batches(count: int, device: str = "cpu", rows: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(rows, 8, device=device), torch.randint(4, (rows,), device=device)) for _ in range(count)]


def plain_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], *, clip: float | None = None, every: int = 1,
    scheduler: Any = None, loss: Any = F.cross_entropy,
) -> list[float]:  # fmt: skip
    losses = []
    for number, (x, y) in enumerate(data, 1):
        value = loss(model(x), y)
        (value / every).backward()
        losses.append(value.item())
        if number % every == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return losses
