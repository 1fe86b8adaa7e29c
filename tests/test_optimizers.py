"""The table of optimizers: the PyTorch class behind each entry, its state, its per-step scalars and its defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.lion import Lion
from onelaunch.optimizers import CONSTANTS, OPTIMIZERS, TORCH_STATE_NAMES, constants
from onelaunch.run.spec import Spec


@dataclass
class Values:
    """Hyper-parameters that no optimizer has by default."""

    momentum: float = 0.7
    nesterov: bool = True
    weight_decay: float = 0.03
    betas: tuple[float, float] = (0.85, 0.96)
    eps: float = 1e-5


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.7, "nesterov": True}),
    "adam": (torch.optim.Adam, {"betas": (0.85, 0.96), "eps": 1e-5}),
    "adamw": (torch.optim.AdamW, {"betas": (0.85, 0.96), "eps": 1e-5}),
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.96, "eps": 1e-5, "momentum": 0.7, "centered": False}),
    "lion": (Lion, {"betas": (0.85, 0.96)}),
}


def stepped(name: str, values: Values, steps: int = 1) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """The entry's optimizer after `steps` steps on a parameter with a gradient."""
    parameter = nn.Parameter(torch.randn(5))
    optimizer = OPTIMIZERS[name].make([parameter], values, 0.2, False)
    for _ in range(steps):
        parameter.grad = torch.randn(5)
        optimizer.step()
    return optimizer, parameter


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_class_gets_the_hyperparameters(name):
    kind, expected = CLASSES[name]
    optimizer, _ = stepped(name, Values())
    assert type(optimizer) is kind
    assert expected.items() <= optimizer.param_groups[0].items()
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert optimizer.param_groups[0]["weight_decay"] == 0.03


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_names_are_those_the_class_keeps(name, momentum):
    entry = OPTIMIZERS[name]
    optimizer, parameter = stepped(name, Values(momentum=momentum, nesterov=momentum > 0))
    kept = {key for key, value in optimizer.state[parameter].items() if value is not None}
    assert {TORCH_STATE_NAMES.get(state, state) for state in entry.state_names(momentum)} == kept - {"step"}
    assert entry.counts_steps == ("step" in kept)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decoupled_decay_scales_the_weights(name):
    """Without a gradient only weight decay moves the weights: by lr * weight_decay where it is decoupled."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = OPTIMIZERS[name].make([parameter], Values(momentum=0.0, nesterov=False), 0.2, False)
    optimizer.step()
    scaled = torch.full_like(parameter, 1 - 0.2 * 0.03)
    coupled_sgd = name == "sgd"  # whose step is lr times the gradient, to which decay has added: the same number
    assert torch.allclose(parameter, scaled, rtol=1e-12) == (OPTIMIZERS[name].decoupled_decay or coupled_sgd)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_scalars_are_pytorch_formulas_in_float64(name):
    values, entry = Values(), OPTIMIZERS[name]
    steps, rates = np.array([0.0, 1.0, 999.0]), np.array([0.1, 0.2, 0.3])
    scalars = entry.step_scalars(values, rates, steps)
    assert {array.dtype for array in scalars.values()} == {np.dtype(np.float64)}
    for i, (step, lr) in enumerate(zip(steps, rates, strict=True)):
        corrects = name in ("adam", "adamw")
        correction1, correction2 = 1 - 0.85 ** (step + 1), math.sqrt(1 - 0.96 ** (step + 1))
        assert scalars["rate"][i] == (-lr / correction1 if corrects else -lr)
        assert scalars["inverse_root"][i] == (1 / correction2 if corrects else 1)
        assert scalars["decay"][i] == 1 - lr * 0.03


@pytest.mark.parametrize(
    ("name", "momentum"),
    [(name, m) for name, entry in OPTIMIZERS.items() for m in (0.0, 0.7) if not m or "momentum" in entry.arguments],
)
def test_scalars_and_constants_give_the_update(name, momentum):
    """The update as the device code computes it, from the scalars and constants alone, follows the PyTorch class."""
    h = Values(momentum=momentum, nesterov=momentum > 0)
    parameter = nn.Parameter(torch.randn(50, dtype=torch.float64))
    optimizer = OPTIMIZERS[name].make([parameter], h, 0.05, False)
    weights = parameter.detach().clone()
    k, entry = constants(h), OPTIMIZERS[name]
    assert tuple(k) == CONSTANTS
    state = {key: torch.zeros_like(weights) for key in entry.state_names(momentum)}
    scalars = entry.step_scalars(h, np.full(20, 0.05), np.arange(20.0))
    for step in range(20):
        rate, root, decay = (float(scalars[key][step]) for key in ("rate", "inverse_root", "decay"))
        g = parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if entry.decoupled_decay:
            weights = weights * decay
        else:
            g = g + k["weight_decay"] * weights
        if name == "lion":
            direction = torch.sign(state["exp_avg"] + k["new_mean"] * (g - state["exp_avg"]))
            state["exp_avg"] = k["beta2"] * state["exp_avg"] + k["new_square"] * g
        elif name == "sgd":
            direction = g
        elif name == "rmsprop":
            state["square_avg"] = k["beta2"] * state["square_avg"] + k["new_square"] * g * g
            direction = g / (state["square_avg"].sqrt() + k["eps"])
        else:
            state["exp_avg"] = state["exp_avg"] + k["new_mean"] * (g - state["exp_avg"])
            state["exp_avg_sq"] = k["beta2"] * state["exp_avg_sq"] + k["new_square"] * g * g
            direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() * root + k["eps"])
        if momentum:
            # PyTorch's SGD starts its buffer with the first gradient, which momentum * 0 + g is too.
            state["momentum"] = k["momentum"] * state["momentum"] + direction
            direction = direction + k["momentum"] * state["momentum"] if name == "sgd" else state["momentum"]
        weights = weights + rate * direction
    torch.testing.assert_close(weights, parameter.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tensor", [False, True], ids=["lr is a float", "lr is a tensor"])
def test_lion_follows_its_paper(tensor):
    parameter = nn.Parameter(torch.randn(50, dtype=torch.float64))
    frozen = nn.Parameter(torch.randn(3))  # never gets a gradient
    lr = torch.tensor(0.0, dtype=torch.float64) if tensor else 0.0
    optimizer = Lion([parameter, frozen], lr, (0.9, 0.99), 0.1)
    weights, mean, untouched = parameter.detach().clone(), torch.zeros(50, dtype=torch.float64), frozen.detach().clone()
    for step in range(20):
        rate = 0.01 * (step + 1)
        if isinstance(lr, torch.Tensor):
            lr.fill_(rate)  # in place: the optimizer reads it at every step
        else:
            optimizer.param_groups[0]["lr"] = rate
        gradient = parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        update = torch.sign(0.9 * mean + 0.1 * gradient)
        weights = weights - rate * (update + 0.1 * weights)
        mean = 0.99 * mean + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), weights, rtol=1e-12, atol=1e-12)
    assert torch.equal(frozen, untouched)
    assert list(optimizer.state) == [parameter]


def test_betas_default_to_those_of_the_optimizer():
    defaults = {name: Spec(rows=8, steps=1, optimizer=name).betas for name in OPTIMIZERS}
    assert defaults == {
        "sgd": (0.9, 0.999), "adam": (0.9, 0.999), "adamw": (0.9, 0.999), "rmsprop": (0.9, 0.99), "lion": (0.9, 0.99)
    }  # fmt: skip
    assert Spec(rows=8, steps=1, optimizer="lion", betas=(0.5, 0.6)).betas == (0.5, 0.6)
    assert Spec(rows=8, steps=1, optimizer="lion", betas=None).betas == (0.9, 0.99)
    parameter, spec = nn.Parameter(torch.zeros(1)), Spec(rows=8, steps=1, optimizer="rmsprop")
    made = OPTIMIZERS["rmsprop"].make([parameter], spec, 0.1, False)
    assert made.param_groups[0]["alpha"] == torch.optim.RMSprop([parameter]).defaults["alpha"]
