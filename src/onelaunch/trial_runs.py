"""Trial runs of a module that leave no trace: on copies of the inputs, with buffers, gradients and generators restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map


def device_of(*values: Any) -> torch.device | None:
    """The device of the first tensor in `values`."""
    return next((leaf.device for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)), None)


def copied(values: Any) -> Any:
    """`values` with copies of its tensors: a trial run may change its inputs in place, or add to their gradients."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(copy, values)


def trial_mode(model: nn.Module, *values: Any) -> contextlib.AbstractContextManager[Any]:
    """Without gradients in evaluation, unless an input requires them: what a model in that mode is called for."""
    differentiated = any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(values))
    return contextlib.nullcontext() if model.training or differentiated else torch.no_grad()


def run_once(
    function: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], number: int = 0
) -> None:
    """One call, with its backward pass in training."""
    output = function(*args, **kwargs)
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if model.training and results:
        torch.autograd.backward([leaf.sum() for leaf in results])
        model.zero_grad(set_to_none=True)


@contextlib.contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Each module's mode (`training`) is afterwards what it was before."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode without gradients; each module's mode is restored."""
    with kept_modes(model), torch.no_grad():
        model.eval()
        yield


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """A trial run leaves no trace: buffers, gradients and random generators are as before."""
    tables = [module._buffers for module in model.modules() if isinstance(module._buffers, dict)]  # not a script's
    entries = [dict(table) for table in tables]  # `self.mean = …` puts in another tensor
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.is_cuda})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for table, own in zip(tables, entries, strict=True):
            table.clear()
            table.update(own)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
