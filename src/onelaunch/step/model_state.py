"""What a recorded step depends on beside its inputs: flags, settings and memory of the model and of the loss.

A recording reads none of them again, so they are compared before every replay. Modules change them in Python during the steps
before a recording, which is why they are remembered after such a step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain
from types import NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SETTINGS = (bool, int, float, str, NoneType)  # types of attributes that are compared
_EVERY_MODULE = frozenset(vars(nn.Module()))
_DELETED = object()


class ModelState:
    """The state of these modules, and of the optimizer's parameters, when `remember` was last called."""

    def __init__(self, roots: Iterable[Any], parameters: Iterable[torch.Tensor]) -> None:
        self._roots = [root for root in roots if isinstance(root, nn.Module)]
        self._optimized = list(parameters)
        self._written: set[tuple[int, str]] = set()  # attributes that forward sets itself are no settings
        self._settings: dict[tuple[int, str], Any] = {}  # by module and name
        self.remember()

    def remember(self, after_forward: bool = False) -> None:
        self._modules = [*{id(one): one for root in self._roots for one in root.modules()}.values()]
        before, now = self._settings, self._read_settings()
        if after_forward:
            self._written.update(key for key, value in now.items() if key not in before or before[key] != value)
        self._settings = {key: value for key, value in now.items() if key not in self._written}
        tables = [(one._buffers, one._modules) for one in self._modules]  # a new parameter is new to the optimizer too
        self._tables = [table for table in chain.from_iterable(tables) if table and isinstance(table, dict)]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        attributes = {id(module): vars(module) for module in self._modules}
        self._own_mode = [one for one in attributes.values() if "training" in one]
        self._other_mode = [
            one for one in self._modules if "training" not in vars(one)
        ]  # compiled by `torch.jit.script`
        self._watched = [(attributes[module], name, value) for (module, name), value in self._settings.items()]
        parameters = (one for root in self._roots for one in root.parameters())
        tensors = [one for one in (*self._optimized, *parameters, *self._entries) if isinstance(one, torch.Tensor)]
        self._tensors = [*{id(one): one for one in tensors}.values()]
        self._placed = [one for one in self._tensors if not (is_traceable_wrapper_subclass(one) or is_lazy(one))]
        self._addresses = [one.data_ptr() for one in self._placed]

    # The next two run in every step. Loops are faster here than `map`, and `id` is slow under an audit hook.

    def flags(self) -> list[bool]:
        """Which modules are in training mode, and which tensors have gradients: other flags are another recording."""
        modes = [one["training"] for one in self._own_mode] + [one.training for one in self._other_mode]
        return modes + [one.requires_grad for one in self._tensors]

    def is_same(self) -> bool:
        """Whether nothing but flags has changed. An equal number in its place counts as changed."""
        for attributes, name, value in self._watched:
            if attributes.get(name, _DELETED) is not value:
                return False
        entries = [entry for table in self._tables for entry in table.values()]
        return (
            len(entries) == len(self._entries)
            and all(map(operator.is_, entries, self._entries))
            and [one.data_ptr() for one in self._placed] == self._addresses
        )

    def change(self) -> str:
        """What has changed, in words, and is remembered now; empty if nothing has."""
        if self.is_same():
            return ""
        settings, entries, addresses = self._settings, self._entries, self._addresses
        self.remember()
        for key in settings | self._settings:
            if key not in settings or key not in self._settings or settings[key] != self._settings[key]:
                return self._label(key)
        if len(entries) != len(self._entries) or not all(map(operator.is_, entries, self._entries)):
            return "a buffer or layer"
        return "" if addresses == self._addresses else "the memory of a parameter or buffer"

    def _read_settings(self) -> dict[tuple[int, str], Any]:
        return {
            (id(module), name): value
            for module in self._modules
            if type(module) is not nn.Linear  # its sizes are its weight's
            for name, value in vars(module).items()
            if name not in _EVERY_MODULE and isinstance(value, SETTINGS)
        }

    def _label(self, key: tuple[int, str]) -> str:
        kinds = [type(module).__name__ for module in self._modules if id(module) == key[0]]
        return ".".join([*kinds, key[1]])
