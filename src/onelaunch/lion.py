"""The Lion optimizer as a PyTorch class."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion of Chen et al., "Symbolic discovery of optimization algorithms" (2023), which PyTorch does not have.

    `lr` may be a scalar tensor on the parameters' device, so that a captured CUDA graph can read it anew in every replay.
    """

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
