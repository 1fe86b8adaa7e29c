"""A network and how it is trained, without the data: what the contenders of a training case have in common."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.run.objective import as_features
from onelaunch.train.inputs import make_run
from onelaunch.train.mlp import mlp

LEARNING_RATE = {"sgd": 0.01, "adam": 1e-3}


@dataclass(frozen=True)
class Workload:
    widths: tuple[int, ...]
    batch: int
    optimizer: str = "sgd"
    precision: str = "fp32"
    loss: str = "cross_entropy"
    bias: bool = True
    uint8_rows: bool = False  # rows of bytes, like images, instead of floats

    @property
    def network(self) -> str:
        return "-".join(map(str, self.widths))

    def run(self, device: torch.device, *, rows: int, held_out: int = 0, engine: str = "auto", **length: int) -> Run:
        """A run with fresh weights and rows. The targets are a linear map of the rows, so that there is something to learn.

        held_out: number of rows for validation; length: `epochs` or `steps`.
        """
        model = mlp(self.widths, seed=int(torch.randint(2**31, ()))).to(device)
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
