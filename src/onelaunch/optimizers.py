"""The optimizers: one entry per update rule. Argument checks, help texts, state names and per-step scalars derive from it.

The update itself is written once per code generator: Triton (`engines/graph/kernels/optimizer.py`), CUDA C++
(`engines/resident/cuda/weights.cuh`) and LLVM (`engines/cpu/code/optimizer.py`); the eager engine runs the PyTorch class.
All of them read the same names. Per run (`constants`):

  momentum, weight_decay, eps    as passed
  new_mean, new_square           1 - betas[0], 1 - betas[1]
  beta2                          betas[1]

Per step (`step_scalars`), in double precision on the host, as PyTorch computes them there too:

  rate          -lr;  with bias correction -lr / (1 - betas[0]**t)
  inverse_root  with bias correction 1 / sqrt(1 - betas[1]**t), else 1
  decay         1 - lr * weight_decay, for decoupled weight decay
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
TORCH_STATE_NAMES = {"momentum": "momentum_buffer"}  # where torch.optim's name differs from ours


class Hyperparameters(Protocol):
    """What an update rule reads. `run.spec.Spec` has all of it."""

    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms" (2023). PyTorch has none; `lr` may be a tensor."""

    def __init__(
        self, params: Iterable[Tensor], lr: float | Tensor, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                mean = state["exp_avg"]
                direction = mean.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - lr * weight_decay).sub_(direction * lr)
                mean.lerp_(parameter.grad, 1 - beta2)


def _sgd(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        parameters, lr=lr, momentum=h.momentum, nesterov=h.nesterov, weight_decay=h.weight_decay, fused=cuda
    )


def _adam(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.Adam(
        parameters, lr=lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay, fused=cuda, capturable=cuda
    )


def _adamw(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay, fused=cuda, capturable=cuda
    )


def _rmsprop(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(
        parameters, lr=lr, alpha=h.betas[1], eps=h.eps, momentum=h.momentum, weight_decay=h.weight_decay,
        capturable=cuda,
    )  # fmt: skip


def _lion(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    return Lion(parameters, lr, h.betas, h.weight_decay)


@dataclass(frozen=True)
class Optimizer:
    name: str
    arguments: tuple[str, ...]  # of `fit`, beside lr and weight_decay
    states: tuple[str, ...]  # tensors it keeps per parameter, in the order of the device code
    make: Callable[[list[Any], Hyperparameters, float | Tensor, bool], torch.optim.Optimizer]  # True: on a CUDA device
    default_betas: tuple[float, float] = (0.9, 0.999)
    bias_correction: bool = False
    decoupled_decay: bool = False  # weight decay scales the weights instead of adding to the gradient

    def state_names(self, momentum: float) -> tuple[str, ...]:
        """The tensors kept per parameter: `states`, and "momentum" where the rule takes momentum and it is not zero."""
        return (*self.states, "momentum") if momentum and "momentum" in self.arguments else self.states

    def step_scalars(self, h: Hyperparameters, rates: Array, steps: Array) -> dict[str, Array]:
        """`rate`, `inverse_root` and `decay` of the steps numbered `steps` (from 0), float64, given their learning rates."""
        rate, inverse_root = -rates, np.ones(len(rates))
        if self.bias_correction:
            times = steps + 1.0
            rate = -rates / (1 - h.betas[0] ** times)
            inverse_root = 1 / np.sqrt(1 - h.betas[1] ** times)
        return {"rate": rate, "inverse_root": inverse_root, "decay": 1 - rates * h.weight_decay}


OPTIMIZERS: Mapping[str, Optimizer] = {
    entry.name: entry
    for entry in (
        Optimizer("sgd", ("momentum", "nesterov"), (), _sgd),
        Optimizer("adam", ("betas", "eps"), ("exp_avg", "exp_avg_sq"), _adam, bias_correction=True),
        Optimizer(
            "adamw", ("betas", "eps"), ("exp_avg", "exp_avg_sq"), _adamw, bias_correction=True, decoupled_decay=True
        ),
        Optimizer("rmsprop", ("betas", "eps", "momentum"), ("square_avg",), _rmsprop, default_betas=(0.9, 0.99)),
        Optimizer("lion", ("betas",), ("exp_avg",), _lion, default_betas=(0.9, 0.99), decoupled_decay=True),
    )
}
CONSTANTS = ("momentum", "weight_decay", "new_mean", "beta2", "new_square", "eps")


def constants(h: Hyperparameters) -> dict[str, float]:
    """The values of CONSTANTS, by name."""
    beta1, beta2 = h.betas
    return {
        "momentum": h.momentum, "weight_decay": h.weight_decay, "new_mean": 1 - beta1, "beta2": beta2,
        "new_square": 1 - beta2, "eps": h.eps,
    }  # fmt: skip
