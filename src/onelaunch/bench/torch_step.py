"""One training step of a run in plain PyTorch: the step of the PyTorch contenders, peers and float64 references alike."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from onelaunch.device import AUTOCAST_DTYPES
from onelaunch.engines.contract import Run
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.objective import as_features, loss_of


class TorchStep:
    """Forward, loss, backward and `torch.optim` update of a copy of the run's model.

    `mode` is a mode of torch.compile for forward and loss; None runs them as written. `dtype` is that of the weights: float32
    with autocast as the run's precision says, or float64, without autocast, for a reference.
    """

    def __init__(self, run: Run, mode: str | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.spec, self.dtype = copy.deepcopy(run.model).to(dtype), run.spec, dtype
        self.autocast = AUTOCAST_DTYPES.get(run.spec.precision) if dtype == torch.float32 else None
        self.loss = self._plain_loss if mode is None else torch.compile(self._plain_loss, mode=mode, dynamic=False)
        self.begin(run)

    def begin(self, run: Run) -> None:
        """Start over with the weights of `run` and new optimizer state. The run may differ in data, seed and length."""
        self.model.load_state_dict(run.model.state_dict())
        self.model.train()
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        make = OPTIMIZERS[run.spec.optimizer].make
        fused = run.device.type == "cuda" and self.dtype == torch.float32  # a reference takes the plain form
        self.optimizer = make(parameters, run.spec, run.spec.lr, fused)
        self.scaler = torch.amp.GradScaler(run.device.type, enabled=self.autocast == torch.float16)

    def _plain_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            output = self.model(as_features(x, self.dtype))
        return loss_of(self.spec, output.to(self.dtype), y)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Train on one batch. Returns its loss, which stays on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(x, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def validation_loss(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """The loss of rows that are not trained on, read back to the host."""
        return self._plain_loss(x, y).item()


@contextmanager
def matmul_precision(run: Run) -> Iterator[None]:
    """fp32 products as the run asks for them: exact for "fp32" and on a CPU, else tf32, which "auto" may use."""
    before: Any = torch.get_float32_matmul_precision()
    exact = run.spec.precision == "fp32" or run.device.type == "cpu"
    torch.set_float32_matmul_precision("highest" if exact else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
