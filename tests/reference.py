"""The oracle's oracle: training loops in plain PyTorch, written by hand over `ol.permutation`, sharing no code with `fit`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import onelaunch as ol

ACTIVATIONS: dict[str, Any] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "sgd-nesterov": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "sgd-momentum": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.8},
    "adam": {"optimizer": "adam", "lr": 3e-3, "weight_decay": 1e-3, "betas": (0.8, 0.99)},
    "adamw": {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6},
}
LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}


def make_optimizer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    arguments = {name: value for name, value in options.items() if name != "optimizer"}
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options["optimizer"]]
    return kind(model.parameters(), **arguments)


def make_scheduler(optimizer: torch.optim.Optimizer, schedule: str, lr: float, total: int) -> Any:
    schedulers = torch.optim.lr_scheduler
    match schedule:
        case "constant":
            return schedulers.ConstantLR(optimizer, factor=1.0, total_iters=0)
        case "linear":
            return schedulers.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=total)
        case "cosine":
            return schedulers.CosineAnnealingLR(optimizer, T_max=total)
        case "one_cycle":
            return schedulers.OneCycleLR(optimizer, max_lr=lr, total_steps=total, cycle_momentum=False)
    raise AssertionError(schedule)


def plain_loop(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    steps: int,
    batch_size: int,
    options: dict[str, Any],
    schedule: str = "constant",
    loss: str = "cross_entropy",
    label_smoothing: float = 0.0,
    seed: int = 0,
) -> list[float]:
    """Train in the model's own dtype and return the loss of every step."""
    optimizer = make_optimizer(model, options)
    scheduler = make_scheduler(optimizer, schedule, options["lr"], steps)
    extra = {"label_smoothing": label_smoothing} if label_smoothing else {}
    losses: list[float] = []
    epoch = 0
    model.train()
    while True:
        order = ol.permutation(len(x), seed, epoch).to(x.device)
        for rows in order.split(batch_size):
            optimizer.zero_grad()
            value = LOSSES[loss](model(x[rows]), y[rows], **extra)
            value.backward()
            optimizer.step()
            losses.append(value.item())
            if len(losses) == steps:
                return losses
            scheduler.step()
        epoch += 1


def problem(loss: str, rows: int = 150, inputs: int = 7, outputs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Fresh random rows with a target that can be learned."""
    x = torch.randn(rows, inputs)
    hidden = torch.tanh(x @ torch.randn(inputs, outputs))
    match loss:
        case "cross_entropy":
            return x, hidden.argmax(dim=1)
        case "mse":
            return x, hidden + 0.1 * torch.randn_like(hidden)
    return x, (hidden > 0).float()


def assert_same_course(losses: list[float], expected: list[float], tolerance: float) -> None:
    got, want = torch.tensor(losses, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    gap = ((got - want).abs() / want.abs().clamp_min(1e-8)).max().item()
    assert gap <= tolerance, f"losses differ by {gap:.2e}, relative"


def assert_same_weights(model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, got), want in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        gap = (got.double() - want.double()).abs().max().item()
        assert gap <= tolerance, f"{name} differs by {gap:.2e}"
