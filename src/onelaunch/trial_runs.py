"""Trial runs of a module that leave no trace: on copies of the inputs, with the module's state and generators restored."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

# The types of generators that have a state: how to read it, and how to write it.
GENERATOR_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    random.Random: (lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    np.random.RandomState: (lambda one: one.get_state(legacy=False), lambda one, state: one.set_state(state)),
    np.random.Generator: (
        lambda one: one.bit_generator.state, lambda one, state: setattr(one.bit_generator, "state", state)
    ),
}  # fmt: skip


def device_of(*values: Any) -> torch.device | None:
    """The device of the first tensor in `values`."""
    return next((leaf.device for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)), None)


def copied(values: Any, device: torch.device | None = None) -> Any:
    """`values` with copies of its tensors, on this device or where they are: a trial run may change its inputs in place, or add
    to their gradients.

    A tensor that is there twice has one copy: a loss may differentiate by the input that is also its target.
    """
    copies: dict[int, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            made = leaf.detach().clone() if device is None else leaf.detach().to(device, copy=True)
            copies[id(leaf)] = made.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

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
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Each module's attributes, buffers, parameters and children are afterwards the same objects as before.

    What forward changes inside an object, such as a list that it appends to, is not undone.
    """
    before = attributes_of(model.modules())
    try:
        yield
    finally:
        restore(before)


def attributes_of(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The dicts of each module's attributes, buffers, parameters and children, and what is in them."""
    names = ("_buffers", "_parameters", "_modules")
    tables = [table for module in modules for table in (vars(module), *(getattr(module, one) for one in names))]
    return [(table, dict(table)) for table in tables if isinstance(table, dict)]  # not a script's


def restore(attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for table, entries in attributes:
        table.update(entries)
        for name in table.keys() - entries.keys():
            del table[name]


class Generators:
    """The states of the global generators on the host, those of PyTorch, `random` and NumPy, and of these others."""

    def __init__(self, others: Iterable[Any] = ()) -> None:
        self._others = [(one, *_reader_and_writer(one)) for one in others]
        self._torchs = torch.get_rng_state()
        self._before = self._states()

    def _states(self) -> list[Any]:
        numpys = np.random.get_state(legacy=False)  # noqa: NPY002
        return [random.getstate(), numpys, *(read(one) for one, read, _ in self._others)]

    def have_drawn(self) -> bool:
        """Whether one of them has drawn a number since."""
        pairs = zip(tree_leaves(self._states()), tree_leaves(self._before), strict=True)
        same = all(np.array_equal(one, other) for one, other in pairs)
        return not (same and torch.equal(torch.get_rng_state(), self._torchs))

    def restore(self) -> None:
        torch.set_rng_state(self._torchs)
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])  # noqa: NPY002
        for (one, _, write), state in zip(self._others, self._before[2:], strict=True):
            write(one, state)


def _reader_and_writer(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(both for kind, both in GENERATOR_STATES.items() if isinstance(generator, kind))


class Undo:
    """What a run has changed, as it was: attributes, buffers, random generators, the gradients of these parameters, and these
    inputs.
    """

    def __init__(
        self, model: nn.Module, parameters: Iterable[torch.Tensor] = (), inputs: Iterable[torch.Tensor] = ()
    ) -> None:
        self._attributes = attributes_of(model.modules())
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self._gradients = [(one, None if one.grad is None else one.grad.clone()) for one in parameters]
        self._devices = sorted({one.device.index for one in model.parameters() if one.is_cuda})
        self._on_devices = [torch.cuda.get_rng_state(device) for device in self._devices]
        owned = (value for table, _ in self._attributes for value in table.values())
        self._owned_and_global = Generators(one for one in owned if isinstance(one, torch.Generator))
        self._inputs = [(one, one._version, one.detach().clone()) for one in inputs if not one.is_inference()]

    @torch.no_grad()
    def __call__(self) -> None:
        restore(self._attributes)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for one, version, before in self._inputs:
            if one._version != version:
                one.copy_(before)
        self._owned_and_global.restore()
        for parameter, gradient in self._gradients:
            if parameter.grad is not None and gradient is not None:  # the memory that a recording adds to
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient
        for device, state in zip(self._devices, self._on_devices, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """A trial run leaves no trace: attributes, buffers, gradients and random generators are as before.

    Parameters are not copied, as a model may fill half of the memory: one that forward changes in place stays changed.
    """
    undo = Undo(model)
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        undo()
        for parameter, gradient in gradients:
            parameter.grad = gradient
