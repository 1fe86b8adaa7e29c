"""A network and how it is trained, without the data: what the contenders of a training case have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.run.objective import as_features
from onelaunch.train.inputs import make_run
from onelaunch.train.mlp import mlp

LEARNING_RATE = {"sgd": 0.01, "adam": 1e-3}


class Residual(nn.Module):
    """x + inner(x)."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def residual_mlp(widths: tuple[int, ...], seed: int) -> nn.Sequential:
    """Linear → ReLU, then x + ReLU(Linear(x)) for each further hidden width (all are equal), then Linear."""
    plain = mlp(widths, seed=seed)
    linears = [layer for layer in plain if isinstance(layer, nn.Linear)]
    blocks = [Residual(linear, nn.ReLU()) for linear in linears[1:-1]]
    return nn.Sequential(nn.Flatten(), linears[0], nn.ReLU(), *blocks, linears[-1])


@dataclass(frozen=True)
class Workload:
    widths: tuple[int, ...]
    batch: int
    optimizer: str = "sgd"
    precision: str = "fp32"
    loss: str = "cross_entropy"
    bias: bool = True
    uint8_rows: bool = False  # rows of bytes, like images, instead of floats
    kind: str = "mlp"  # or "layer_norm" (before each activation), or "residual" (see residual_mlp)
    activation: str = "relu"

    @property
    def engine(self) -> str:
        """The engine that `fit` takes on a GPU."""
        return "resident" if self.kind == "mlp" else "graph"

    @property
    def checked(self) -> Workload:
        """What is compared with float64 in its place. After a LayerNorm many values are near the kink of ReLU: rounding moves
        one across in a run of 50 steps in four, also in PyTorch, and the loss then changes by 5e-5."""
        return replace(self, activation="tanh") if self.kind == "layer_norm" else self

    @property
    def network(self) -> str:
        return "-".join(map(str, self.widths))

    def run(self, device: torch.device, *, rows: int, held_out: int = 0, engine: str = "auto", **length: int) -> Run:
        """A run with fresh weights and rows. The targets are a linear map of the rows, so that there is something to learn.

        held_out: number of rows for validation; length: `epochs` or `steps`.
        """
        seed = int(torch.randint(2**31, ()))
        if self.kind == "residual":
            model = residual_mlp(self.widths, seed).to(device)
        else:
            norm = self.kind == "layer_norm"
            model = mlp(self.widths, activation=self.activation, layer_norm=norm, seed=seed).to(device)
        for layer in model.modules():
            if isinstance(layer, nn.Linear) and not self.bias:
                layer.register_parameter("bias", None)
        x = torch.rand(rows + held_out, self.widths[0], device=device)
        x = (x * 255).round().to(torch.uint8) if self.uint8_rows else x
        y = (as_features(x, torch.float32) - 0.5) @ torch.randn(self.widths[0], self.widths[-1], device=device)
        y = y.argmax(dim=1) if self.loss == "cross_entropy" else y / self.widths[0] ** 0.5
        options: dict[str, Any] = {
            **length, "batch_size": self.batch, "optimizer": self.optimizer, "lr": LEARNING_RATE[self.optimizer],
            "loss": self.loss, "precision": self.precision, "engine": engine,
        }  # fmt: skip
        validation = (x[rows:], y[rows:]) if held_out else None
        return make_run(model, x[:rows], y[:rows], validation, options)

    @property
    def flops_per_row(self) -> int:
        """Of the products for forward, dW and dX; the input needs no dX."""
        products = [inputs * outputs for inputs, outputs in pairwise(self.widths)]
        return 6 * sum(products) - 2 * products[0]
