"""A fused model against the original: outputs, gradients, buffers and state_dict, in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.chains import find_chains
from onelaunch.fuse.placing import regions
from onelaunch.fuse.rewrite import rewrite
from onelaunch.fuse.tracing import RefusedError, Trace, trace

EXACT = 1e-12  # absolute, or relative to the largest element where that is above 1


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def results(
    model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any] | None = None
) -> dict[str, torch.Tensor]:
    """Outputs, gradients and moved buffers of one call, with buffers, inputs and random state as they were before it."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fresh = [
        x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    # A value that is no leaf: a model may change its input in place.
    passed = [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x for x in fresh]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        outputs = [out for out in tensors_in(model(*passed, **(keywords or {}))) if out.is_floating_point()]
    found = {f"output {index}": out.detach().clone() for index, out in enumerate(outputs)}
    leaves: dict[str, torch.Tensor] = {
        f"gradient of {name}": p for name, p in model.named_parameters() if p.requires_grad
    }
    leaves |= {
        f"gradient of input {i}": x for i, x in enumerate(fresh) if isinstance(x, torch.Tensor) and x.requires_grad
    }
    differentiable = [out for out in outputs if out.requires_grad]
    if differentiable:
        weights = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in differentiable]
        gradients = torch.autograd.grad(differentiable, list(leaves.values()), weights, allow_unused=True)
        for name, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                found[name] = gradient
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
    return found


def assert_same(model: nn.Module, fused: nn.Module, *inputs: Any, **keywords: Any) -> None:
    """In both modes, with and without gradients; modes are left as they were found."""
    assert list(model.state_dict()) == list(fused.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), fused.parameters(), strict=True))
    modes = [(module, module.training) for tree in (model, fused) for module in tree.modules()]
    for mode in (True, False):
        model.train(mode)
        fused.train(mode)
        assert_equal(results(fused, inputs, keywords), results(model, inputs, keywords))
        with torch.no_grad():
            assert_equal(results(fused, inputs, keywords), results(model, inputs, keywords))
    for module, training in modes:
        module.training = training


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, value.abs().max().item()) if value.numel() and value.is_floating_point() else 1.0
        limit = EXACT * scale
        error = (got[name] - value).abs().max().item() if value.numel() else 0.0
        assert got[name].shape == value.shape, name
        assert error <= limit, f"{name} differs by {error:.1e}"  # also fails on NaN


def fused_names(fused: nn.Module, training: bool) -> list[str]:
    """What the outermost regions fuse for their likeliest call in a mode."""
    found: list[str] = []
    covered: list[str] = []
    for region in regions(fused):
        if any(region.path == done or region.path.startswith(f"{done}.") or not done for done in covered):
            continue
        covered.append(region.path)
        for plan in region.plans:
            if plan.trace is not None and _mode(plan) is training:
                found += [chain.name for chain in plan.fused]
                break
    return found


def reasons(fused: nn.Module, training: bool) -> list[str]:
    return [
        chain.reason
        for region in regions(fused)
        for plan in region.plans
        if _mode(plan) is training
        for chain in plan.chains
        if chain.reason
    ]


def refusal(model: nn.Module) -> str:
    """Why a model is not traced."""
    with pytest.raises(RefusedError) as refused:
        trace(model, Arguments.required_by(type(model).forward))
    return str(refused.value)


def _mode(plan: Any) -> bool:
    return next(value for _, name, value in plan.guard.values if name == "training")


def planned(fused: nn.Module, x: torch.Tensor) -> list[str]:
    """What is fused in a call as the modules stand."""
    plans = [region.plan((x,), {}) for region in regions(fused)]
    return [chain.name for plan in plans if plan is not None for chain in plan.fused]


def capture(model: nn.Module, *inputs: Any) -> tuple[Callable[..., Any], list[str], list[str]]:
    """`torch.compile` with the backend's rewriting, whether it pays or not; what is fused, and why the rest is not."""
    names: list[str] = []
    reasons: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        chains = find_chains(Trace(gm.graph, gm, {}, {}))
        fused = [chain for chain in chains if chain.reason is None]
        names.extend(chain.name for chain in fused)
        reasons.extend(chain.reason for chain in chains if chain.reason)
        rewrite(gm.graph, fused)
        gm.recompile()
        return gm.forward

    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    compiled(*inputs)
    return compiled, names, reasons
