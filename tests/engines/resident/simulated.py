"""Runs of simulated plans beside PyTorch, and of plans that are wrong on purpose."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from tests.conftest import TOLERANCE
from tests.engines.resident.planning import forced_plan
from tests.engines.resident.running import Task
from tests.engines.resident.simulator import Simulation
from tests.reference import ACTIVATIONS, plain_loop, problem

RELATIVE, ABSOLUTE = TOLERANCE[torch.float64]
Choose = Callable[[list[int]], int]


def at_random(seed: int) -> Choose:
    return random.Random(seed).choice


# Which block runs next among those that can. The clocks find a race in any order, so each plan needs one of them only.
ORDERS: dict[str, Callable[[], Choose]] = {
    "lowest rank first": lambda: min,
    "highest rank first": lambda: max,
    "at random": lambda: at_random(4),
}


def model_of(widths: list[int], activation: str | None, *, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs, bias=bias))
        layers += [ACTIVATIONS[activation]()] if activation and index < len(widths) - 2 else []
    return nn.Sequential(*layers).double()


def task_of(plan: Plan, *, rows: int = 50, **options: Any) -> tuple[Task, nn.Sequential]:
    """Fresh weights and rows for a plan, and a model with the same weights."""
    linears = [layer.stage.linear for layer in plan.layers]
    chain = plan.layers[0].stage.chain
    widths = [linears[0].inputs, *(linear.outputs for linear in linears)]
    model = model_of(widths, chain[0].name if chain else None, bias=linears[0].bias)  # type: ignore[union-attr]
    x, y = problem(plan.settings.loss, rows, widths[0], widths[-1])
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [layer.weight.detach().numpy().copy() for layer in layers]
    biases = [
        np.zeros(len(w)) if layer.bias is None else layer.bias.detach().numpy().copy()
        for layer, w in zip(layers, weights, strict=True)
    ]
    targets = y.numpy() if plan.settings.loss == "cross_entropy" else y.double().numpy()
    return Task(weights, biases, x.double().numpy(), targets, lr=0.3, **options), model


def crowded_plan(widths: list[int], blocks: int, cluster: bool) -> UnitsPlan:
    """A plan for a chip with almost no shared memory: it makes do with the fewest buffers."""
    return forced_plan(widths, blocks, cluster, 16, batch=20, chip=Chip(132, 1024, True))


def assert_follows(plan: Plan, choose: Choose, *, rows: int = 50, **options: Any) -> None:
    """Losses and weights of the simulated plan are those of PyTorch in float64."""
    task, model = task_of(plan, rows=rows, **options)
    y = torch.from_numpy(task.y)
    sgd = {"optimizer": "sgd", "lr": task.lr, "momentum": task.momentum}
    expected = plain_loop(
        model, torch.from_numpy(task.x), y, steps=task.steps, batch_size=plan.settings.batch, options=sgd,
        loss=plan.settings.loss, seed=task.seed,
    )  # fmt: skip
    simulation = Simulation(plan, task)
    losses = simulation.run(choose)
    np.testing.assert_allclose(losses, expected, rtol=RELATIVE, atol=ABSOLUTE)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer, (weight, bias) in zip(layers, simulation.weights(), strict=True):
        np.testing.assert_allclose(weight, layer.weight.detach().numpy(), rtol=RELATIVE, atol=ABSOLUTE)
        if layer.bias is not None:
            np.testing.assert_allclose(bias, layer.bias.detach().numpy(), rtol=RELATIVE, atol=ABSOLUTE)


def run_broken(plan: Plan, *, phases: list[str] | None = None, choose: Choose = min) -> None:
    """Run a plan, or other phases than its own, that should end in a RaceError."""
    task, _ = task_of(plan, steps=4, validation_passes=1)
    Simulation(plan, task, phases=phases).run(choose)
