"""The update of every optimizer, as native code, against torch.optim on the same gradients."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.engines import cpu
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.optimizer import Update, UpdateRule
from onelaunch.engines.cpu.plan.settings import HYPERPARAMETERS, SCALARS
from onelaunch.engines.cpu.plan.target import Target, host
from onelaunch.optimizers import OPTIMIZERS, constants
from onelaunch.run.spec import Spec
from onelaunch.run.step_scalars import step_scalars
from tests.conftest import WEIGHT_TOLERANCE
from tests.engines.cpu.native_functions import Loaded, runnable_targets
from tests.engines.cpu.runs import make
from tests.pairwise import cases

UNITS, STEPS = 64, 30


def settings_of(optimizer: str, decays: bool, momentum: bool) -> dict[str, Any]:
    entry = OPTIMIZERS[optimizer]
    chosen: dict[str, Any] = {"optimizer": optimizer, "lr": 0.01, "weight_decay": 0.1 if decays else 0.0}
    if momentum and "momentum" in entry.arguments:
        chosen |= {"momentum": 0.8, "nesterov": "nesterov" in entry.arguments}
    if momentum and "betas" in entry.arguments:
        chosen["betas"] = (0.7, 0.95)
    return chosen


def rule_of(options: dict[str, Any]) -> tuple[Spec, UpdateRule]:
    x, y = torch.zeros(STEPS, 1), torch.zeros(STEPS, dtype=torch.int64)
    spec = make(nn.Sequential(nn.Linear(1, 1)), x, y, batch_size=1, epochs=1, **options).spec
    return spec, UpdateRule(spec.optimizer, spec.momentum > 0, spec.nesterov, spec.weight_decay > 0)


def train(
    spec: Spec, rule: UpdateRule, target: Target, weights: np.ndarray[Any, Any], gradients: np.ndarray[Any, Any]
) -> None:
    """Update `weights` in place with one gradient per step."""
    module = Module(target)
    stride = 2 * UNITS  # floats from the weights to their first state

    def emit(f: Function) -> None:
        update = Update(f, rule, f["scalars"], f["hyper"])
        copies = update.copies(f["parameters"], f.i64(4 * stride))
        for first in range(0, UNITS, f.lanes):
            update.apply(f.vload(f["gradient"], first), copies, first)

    module.function("update", "ptr %parameters, ptr %gradient, ptr %scalars, ptr %hyper", emit, public=True)
    loaded = Loaded(module)
    function = loaded.function("update", *[ctypes.c_void_p] * 4)
    arena = np.zeros(stride * (1 + len(rule.state_names)), np.float32)
    arena[:UNITS] = weights
    hyper = np.array([constants(spec).get(name, 0.0) for name in HYPERPARAMETERS], np.float32)
    scalars = step_scalars(spec, 0, STEPS, 1)
    table = np.stack([scalars[name] for name in SCALARS], 1).astype(np.float32)
    for line, gradient in zip(table, gradients, strict=True):
        function(arena.ctypes.data, gradient.ctypes.data, line.ctypes.data, hyper.ctypes.data)
    weights[:] = arena[:UNITS]


@pytest.mark.parametrize(
    ("optimizer", "decays", "momentum", "target"),
    cases(tuple(OPTIMIZERS), (False, True), (False, True), runnable_targets()),
    ids=lambda value: value.cpu if isinstance(value, Target) else str(value),
)
def test_updates_are_those_of_torch_optim(optimizer: str, decays: bool, momentum: bool, target: Target) -> None:
    spec, rule = rule_of(settings_of(optimizer, decays, momentum))
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(STEPS, UNITS, generator=generator)
    gradients[:, :5] = 0  # a unit without a gradient: Lion's sign(0) is 0
    weights = torch.randn(UNITS, generator=generator)
    reference = weights.double().requires_grad_()
    torch_optimizer = OPTIMIZERS[optimizer].make([reference], spec, spec.lr, False)
    for gradient in gradients:
        reference.grad = gradient.double()
        torch_optimizer.step()
    ours = weights.numpy()
    train(spec, rule, target, ours, gradients.numpy())
    np.testing.assert_allclose(ours, reference.detach().numpy(), rtol=0, atol=WEIGHT_TOLERANCE / 10)


def test_the_engine_declares_the_optimizers_it_has() -> None:
    """An optimizer that the emitter does not know raises; it never runs another one's arithmetic."""

    def has(name: str) -> bool:
        rule = UpdateRule(name)

        def emit(f: Function) -> None:
            update = Update(f, rule, f["p"], f["p"])
            update.apply(f.zero, update.copies(f["p"], f.i64(0)), 0)

        try:
            Module(host()).function("f", "ptr %p", emit)
        except (AssertionError, KeyError):
            return False
        return True

    assert {name for name in [*OPTIMIZERS, "unknown"] if has(name)} == cpu.OPTIMIZERS
