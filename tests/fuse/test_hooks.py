"""Hooks of a fused model run, also those that are added after its first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol

X = torch.randn(4, 6)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""


def test_hooks_run() -> None:
    model, seen = network(), []
    model.register_forward_pre_hook(lambda module, args: seen.append("before"))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    fused = ol.fuse(model)
    torch.testing.assert_close(fused(X), model(X))
    assert seen.count("before") == 2


@pytest.mark.parametrize("register_on_fused", [True, False])
def test_hooks_of_the_module_itself_may_come_and_go(register_on_fused: bool) -> None:
    model = network()
    fused = ol.fuse(model, X)
    owner = fused if register_on_fused else model
    expected = fused(X)
    handle = owner.register_forward_hook(lambda module, args, output: output * 3)
    torch.testing.assert_close(fused(X), 3 * expected)
    handle.remove()
    torch.testing.assert_close(fused(X), expected)
    owner.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    torch.testing.assert_close(fused(X), model(X * 0))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which Dynamo looks at
@pytest.mark.parametrize("register_on_fused", [True, False])
def test_backward_hooks_of_the_module_itself(register_on_fused: bool) -> None:
    model, seen = network(), []

    def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append(outputs[0].shape)

    fused = ol.fuse(model)
    fused(X).sum().backward()
    owner = fused if register_on_fused else model
    owner.register_full_backward_hook(hook)
    x = X.clone().requires_grad_()
    fused(x).sum().backward()
    assert seen == [(4, 3)]
