"""Training loops in plain PyTorch over `ol.permutation` that share no code with `fit`: the reference for the eager engine."""

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
    "elu": nn.ELU,
    "selu": nn.SELU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "sgd-nesterov": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "sgd-momentum": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.8},
    "adam": {"optimizer": "adam", "lr": 3e-3, "weight_decay": 1e-3, "betas": (0.8, 0.99)},
    "adamw": {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6},
    "rmsprop": {"optimizer": "rmsprop", "lr": 3e-3, "weight_decay": 1e-3, "eps": 1e-6},
    "rmsprop-momentum": {"optimizer": "rmsprop", "lr": 1e-3, "momentum": 0.8, "betas": (0.9, 0.95), "eps": 1e-6},
    "lion": {"optimizer": "lion", "lr": 1e-3, "weight_decay": 0.1, "betas": (0.8, 0.95)},
}
LOSSES = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss, "bce_with_logits": F.binary_cross_entropy_with_logits}


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. (2023), line by line."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr})
        self.weight_decay, self.betas = weight_decay, betas

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        lr, (beta1, beta2) = self.param_groups[0]["lr"], self.betas
        for parameter in self.param_groups[0]["params"]:
            gradient, mean = parameter.grad, self.state[parameter].get("m", torch.zeros_like(parameter))
            update = torch.sign(beta1 * mean + (1 - beta1) * gradient)
            parameter.copy_(parameter - lr * (update + self.weight_decay * parameter))
            self.state[parameter]["m"] = beta2 * mean + (1 - beta2) * gradient


def make_optimizer(model: nn.Module, options: dict[str, Any]) -> torch.optim.Optimizer:
    """The optimizer of the arguments of `fit` in `options`."""
    arguments = {name: value for name, value in options.items() if name != "optimizer"}
    if options["optimizer"] == "rmsprop":
        arguments["alpha"] = arguments.pop("betas", (0.9, 0.99))[1]
    kinds: dict[str, Any] = {
        "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop,
        "lion": PlainLion,
    }  # fmt: skip
    return kinds[options["optimizer"]](model.parameters(), **arguments)


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
    """Train `model` in place and in its own dtype, and return the loss of every step."""
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


def losses_of_rows(loss: str, output: torch.Tensor, y: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """The loss of each row, before the mean over the batch."""
    if loss == "cross_entropy":
        return F.cross_entropy(output, y, reduction="none", label_smoothing=label_smoothing)
    each = F.mse_loss if loss == "mse" else F.binary_cross_entropy_with_logits
    return each(output, y.to(output.dtype), reduction="none").mean(dim=1)


def weighted_loop(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor,
    *,
    steps: int,
    batch_size: int,
    options: dict[str, Any],
    loss: str = "cross_entropy",
    label_smoothing: float = 0.0,
    clip_norm: float | None = None,
    seed: int = 0,
) -> list[float]:
    """Train `model` in place in float64 on the weighted mean of the rows' losses, with `clip_grad_norm_`; the losses."""
    model.double()
    optimizer = make_optimizer(model, options)
    losses: list[float] = []
    for epoch in range(steps):
        for rows in ol.permutation(len(x), seed, epoch).to(x.device).split(batch_size):
            optimizer.zero_grad()
            w = weights[rows].double()
            value = (w * losses_of_rows(loss, model(x[rows].double()), y[rows], label_smoothing)).sum() / w.sum()
            value.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            losses.append(value.item())
            if len(losses) == steps:
                return losses
    raise AssertionError


def problem(loss: str, rows: int = 150, inputs: int = 7, outputs: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows x `[rows, inputs]` with targets for `loss` that a network can learn."""
    x = torch.randn(rows, inputs)
    hidden = torch.tanh(x @ torch.randn(inputs, outputs))
    match loss:
        case "cross_entropy":
            return x, hidden.argmax(dim=1)
        case "mse":
            return x, hidden + 0.1 * torch.randn_like(hidden)
    return x, (hidden > 0).float()


def assert_same_course(losses: list[float], expected: list[float], tolerance: float) -> None:
    got, reference = torch.tensor(losses, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    gap = ((got - reference).abs() / reference.abs().clamp_min(1e-8)).max().item()
    assert gap <= tolerance, f"losses differ by {gap:.2e}, relative"


def assert_same_weights(model: nn.Module, expected: nn.Module, tolerance: float) -> None:
    for (name, got), reference in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        gap = (got.double() - reference.double()).abs().max().item()
        assert gap <= tolerance, f"{name} differs by {gap:.2e}"
