"""The optimizers: one entry per update rule. Argument checks, help texts, state names and per-step scalars derive from them.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:  # help texts read the table, and must not wait for these to be imported
    import numpy as np
    import torch
    from torch import Tensor

Array: TypeAlias = "np.ndarray[Any, Any]"
TORCH_STATE_NAMES = {"momentum": "momentum_buffer"}  # our name: that of torch.optim, where they differ


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


Make: TypeAlias = "Callable[[list[Any], Hyperparameters, float | Tensor, bool], torch.optim.Optimizer]"


def _sgd(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    from torch.optim import SGD

    return SGD(parameters, lr=lr, momentum=h.momentum, nesterov=h.nesterov, weight_decay=h.weight_decay, fused=cuda)


def _adam(decoupled: bool) -> Make:
    def make(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
        from torch.optim import Adam, AdamW

        return (AdamW if decoupled else Adam)(
            parameters, lr=lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay, fused=cuda, capturable=cuda
        )

    return make


def _rmsprop(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    from torch.optim import RMSprop

    return RMSprop(
        parameters, lr=lr, alpha=h.betas[1], eps=h.eps, momentum=h.momentum, weight_decay=h.weight_decay,
        capturable=cuda,
    )  # fmt: skip


def _lion(parameters: list[Any], h: Hyperparameters, lr: float | Tensor, cuda: bool) -> torch.optim.Optimizer:
    from onelaunch.lion import Lion

    return Lion(parameters, lr, h.betas, h.weight_decay)


@dataclass(frozen=True)
class Optimizer:
    """An update rule. `make(parameters, hyperparameters, lr, cuda)` returns the PyTorch optimizer that defines it.

    With `cuda`, the parameters are on a CUDA device, `lr` is a tensor there, and a CUDA graph can capture the step.
    """

    name: str
    arguments: tuple[str, ...]  # of `fit`, beside lr and weight_decay
    states: tuple[str, ...]  # tensors kept per parameter, in the order of the device code
    make: Make
    default_betas: tuple[float, float] = (0.9, 0.999)
    bias_correction: bool = False
    decoupled_decay: bool = False  # weight decay scales the weights instead of adding to the gradient
    counts_steps: bool = False  # the PyTorch optimizer keeps the number of steps per parameter

    def state_names(self, momentum: float) -> tuple[str, ...]:
        """The tensors kept per parameter: `states`, and "momentum" where the rule takes momentum and it is not zero."""
        return (*self.states, "momentum") if momentum and "momentum" in self.arguments else self.states

    def step_scalars(self, h: Hyperparameters, rates: Array, steps: Array) -> dict[str, Array]:
        """`rate`, `inverse_root` and `decay` of the steps numbered `steps` (from 0), whose learning rates are `rates`."""
        import numpy as np

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
        Optimizer(
            "adam", ("betas", "eps"), ("exp_avg", "exp_avg_sq"), _adam(decoupled=False),
            bias_correction=True, counts_steps=True,
        ),
        Optimizer(
            "adamw", ("betas", "eps"), ("exp_avg", "exp_avg_sq"), _adam(decoupled=True),
            bias_correction=True, counts_steps=True, decoupled_decay=True,
        ),
        Optimizer(
            "rmsprop", ("betas", "eps", "momentum"), ("square_avg",), _rmsprop,
            default_betas=(0.9, 0.99), counts_steps=True,
        ),
        Optimizer("lion", ("betas",), ("exp_avg",), _lion, default_betas=(0.9, 0.99), decoupled_decay=True),
    )
}  # fmt: skip
CONSTANTS = ("momentum", "weight_decay", "new_mean", "beta2", "new_square", "eps")


def constants(h: Hyperparameters) -> dict[str, float]:
    """The values of CONSTANTS by name, for one run."""
    beta1, beta2 = h.betas
    return {
        "momentum": h.momentum, "weight_decay": h.weight_decay, "new_mean": 1 - beta1, "beta2": beta2,
        "new_square": 1 - beta2, "eps": h.eps,
    }  # fmt: skip
