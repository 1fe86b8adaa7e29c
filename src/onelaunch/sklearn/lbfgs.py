"""`solver="lbfgs"`: SciPy's L-BFGS-B on the loss of all rows at once, in float64, with the gradient of PyTorch.

The objective is scikit-learn's: the weighted mean over rows of the cross-entropy, of half the squared error summed over the
targets, or of the binary cross-entropy summed over the labels; plus alpha / 2 times the sum of all squared weights (no
biases), divided by the number of rows, or by the sum of their weights.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from onelaunch.device import device_name
from onelaunch.errors import DivergedError
from onelaunch.sklearn.training import Prepared
from onelaunch.train.history import History


@dataclass(frozen=True)
class LbfgsSettings:
    """When L-BFGS ends: after `max_iter` iterations, `max_fun` losses, or where no derivative is larger than `tol`."""

    alpha: float
    max_iter: int
    max_fun: int
    tol: float
    label_smoothing: float
    verbose: bool


class Objective:
    """The loss of a float64 network on all rows, and its gradient, as functions of one vector of all parameters."""

    def __init__(self, model: nn.Sequential, prepared: Prepared, settings: LbfgsSettings) -> None:
        self.model, self.loss, self.settings = model, prepared.loss, settings
        self.parameters = list(model.parameters())
        self.penalised = [module.weight for module in model if isinstance(module, nn.Linear)]
        device = self.parameters[0].device
        self.x = torch.from_numpy(prepared.x).to(device, torch.float64)
        self.y = torch.from_numpy(prepared.y).to(device)
        weight = np.ones(len(prepared.x)) if prepared.weight is None else prepared.weight
        self.total_weight = prepared.total_weight
        self.weight = torch.from_numpy(weight).to(device, torch.float64)

    def __call__(self, vector: np.ndarray) -> tuple[float, np.ndarray]:
        """The loss and its gradient, float64 [parameters]. The model keeps these parameters."""
        self.set(vector)
        with torch.enable_grad():
            penalty = sum((weight.square().sum() for weight in self.penalised), torch.zeros(()))
            mean = (self.weight * self._of_rows()).sum() / self.weight.sum()
            loss = mean + self.settings.alpha / 2 * penalty / self.total_weight
            gradient = torch.autograd.grad(loss, self.parameters)
        return loss.item(), parameters_to_vector(gradient).cpu().numpy()

    def set(self, vector: np.ndarray) -> None:
        with torch.no_grad():
            vector_to_parameters(torch.from_numpy(vector).to(self.x.device), self.parameters)

    def start(self) -> np.ndarray:
        """The parameters of the model, float64 [parameters]."""
        return parameters_to_vector(self.parameters).detach().cpu().numpy()

    def _of_rows(self) -> Tensor:
        """The loss of each row."""
        output = self.model(self.x)
        if self.loss == "cross_entropy":
            return F.cross_entropy(output, self.y, reduction="none", label_smoothing=self.settings.label_smoothing)
        y = self.y.to(torch.float64)
        if self.loss == "mse":
            return F.mse_loss(output, y, reduction="none").sum(dim=1) / 2
        return F.binary_cross_entropy_with_logits(output, y, reduction="none").sum(dim=1)


def train_lbfgs(model: nn.Sequential, prepared: Prepared, settings: LbfgsSettings) -> History:
    """Train a float64 model in place. The one record of the history has the number of iterations as `step`.

    Warns with scikit-learn's ConvergenceWarning if the iterations end early. Raises DivergedError if the loss or a weight is
    not finite at the end.
    """
    objective = Objective(model, prepared, settings)
    history = History(engine="eager", reason="solver='lbfgs' is SciPy's L-BFGS-B over PyTorch", precision="fp64")
    history.device = device_name(objective.x.device)

    def after_iteration(intermediate_result: Any) -> None:
        history.losses.append(float(intermediate_result.fun))
        if settings.verbose:
            print(f"Iteration {len(history.losses)}, loss = {intermediate_result.fun:.8f}")

    started = time.perf_counter()
    model.train()
    found = scipy.optimize.minimize(
        objective, objective.start(), method="L-BFGS-B", jac=True, callback=after_iteration,
        options={"maxiter": settings.max_iter, "maxfun": settings.max_fun, "gtol": settings.tol},
    )  # fmt: skip
    objective.set(found.x)
    history.seconds = time.perf_counter() - started
    if not (np.isfinite(found.fun) and np.isfinite(found.x).all()):
        remedy = "scale X and y down, or pass another alpha"
        raise DivergedError(f"solver='lbfgs' ended with a loss or weights that are not finite: {remedy}", found.nit)
    iterations = min(found.nit, settings.max_iter)
    if found.status:
        limits = f"max_iter={settings.max_iter} and max_fun={settings.max_fun}"
        warnings.warn(
            f"lbfgs has not converged after {iterations} iterations ({found.message}): raise {limits}, or tol",
            ConvergenceWarning, stacklevel=2,
        )  # fmt: skip
    history.epochs.append(
        {
            "epoch": 0, "step": iterations, "loss": float(found.fun), "accuracy": None, "validation": None, "lr": None,
            "seconds": history.seconds,
        }
    )  # fmt: skip
    return history
