"""What a recorded step depends on beside its inputs: flags, settings and memory of the model and of the loss, and what their
functions read from outside.

A recording reads none of them again, so they are compared before every replay. What forward itself changes in Python is told
apart by looking before and after the steps that run in Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import BuiltinFunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from onelaunch.step.inputs import CONSTANTS, are_same_objects, is_same_value
from onelaunch.step.outside import OF_EVERY_MODULE, Variable, outside_variables
from onelaunch.trial_runs import GENERATOR_STATES, attributes_of, restore

# Types of attributes that are compared, tensors by identity.
SETTINGS = (*CONSTANTS, BuiltinFunctionType, MethodType, torch.Tensor, np.ndarray)
SIZES_OF_WEIGHT = frozenset({"in_features", "out_features"})  # of nn.Linear, of which there are many
_MISSING = object()

Key = tuple[int, str]  # the id of a module, or of where a variable is from, and the name


class ModelState:
    """The state of these modules, and of the optimizer's `parameters()`, when it was last looked at."""

    def __init__(self, roots: Sequence[Any], parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._roots = roots
        self._outside = self._find_outside()
        self._parameters = parameters
        self._changed_once: set[Key] = set()  # by forward
        self._written: set[Key] = set()  # what forward sets again and again, or cannot have read, is no setting
        self._look()

    def _look(self) -> None:
        modules = [one for one in (*self._roots, *self._read_outside().values()) if issubclass(type(one), nn.Module)]
        self._modules = [*{id(one): one for module in modules for one in module.modules()}.values()]
        self._attributes = [vars(one) for one in self._modules]
        self._sizes = [*map(len, self._attributes)]
        self._own_mode = [one for one in self._attributes if "training" in one]
        self._other_mode = [one for one in self._modules if "training" not in vars(one)]  # of `torch.jit.script`
        self._settings = self._read_settings()
        places = self._places()
        self._watched = [(places[place], name, value) for (place, name), value in self._settings.items()]
        tables = chain.from_iterable((one._parameters, one._buffers, one._modules) for one in self._modules)
        dicts = [table for table in tables if isinstance(table, dict)]  # not a script's
        self._tables, self._empty = [one for one in dicts if one], [one for one in dicts if not one]
        self._entries = list(chain.from_iterable(map(dict.values, self._tables)))
        tensors = [one for one in (*self._parameters(), *self._entries) if isinstance(one, torch.Tensor)]
        self._tensors = [*{id(one): one for one in tensors}.values()]
        attributes = {id(one): one for one in self._settings.values() if issubclass(type(one), torch.Tensor)}
        self._placed = [one for one in (*self._tensors, *attributes.values()) if _has_address(one)]
        self._addresses = [one.data_ptr() for one in self._placed]

    # The next two run in every step. Loops are faster here than `map`, and `id` is slow under an audit hook.

    def flags(self) -> list[bool]:
        """Which modules are in training mode, and which tensors have gradients: other flags are another recording."""
        modes = [one["training"] for one in self._own_mode] + [one.training for one in self._other_mode]
        return modes + [one.requires_grad for one in self._tensors]

    def is_same(self) -> bool:
        """Whether nothing but flags has changed."""
        for index, (place, name, value) in enumerate(self._watched):
            now = place.get(name, _MISSING)
            if now is not value:
                if not is_same_value(now, value):
                    return False
                self._watched[index] = place, name, now  # an equal number
        entries = [entry for table in self._tables for entry in table.values()]
        return (
            are_same_objects(entries, self._entries)
            and not any(self._empty)
            and [*map(len, self._attributes)] == self._sizes
            and [one.data_ptr() for one in self._placed] == self._addresses
        )

    def change(self, recorded: bool) -> str:
        """What was changed between two steps, in words; empty if nothing was. `recorded`: whether there are recordings yet."""
        if self.is_same():
            return ""
        before, places, replaced, changed = self._settings, self._places(), self._look_again(), ""
        for key in before | self._settings:
            old, new = before.get(key, _MISSING), self._settings.get(key, _MISSING)
            if is_same_value(old, new) or (not recorded and key in self._changed_once):
                continue
            if old is _MISSING and key[0] in places and not self._was_there(key):  # such as what an evaluation keeps
                self._written.add(key)
            else:
                changed = changed or self._label(key)
        self._outside = self._find_outside()  # other functions may read others
        self._look()
        places = self._places()
        self._written = {key for key in self._written if key[0] in places}  # others may have their `id` one day
        return changed or replaced

    def follow_forward(self, recorded: bool) -> str:
        """After forward ran in Python: what it has replaced that recordings may read, in words; empty if nothing.

        `recorded`: whether it was recorded, so that it will be the recording that writes the tensors that were set meanwhile.
        """
        if self.is_same():
            return ""
        before, replaced = self._settings, self._look_again()
        for key, new in self._settings.items():
            old = before.get(key, _MISSING)
            if is_same_value(old, new):
                continue
            if issubclass(type(old), torch.Tensor) or issubclass(type(new), torch.Tensor):
                if recorded:
                    self._written.add(key)
                elif old is not _MISSING:
                    replaced = replaced or self._label(key)
            elif key in self._changed_once:
                self._written.add(key)
            self._changed_once.add(key)
        self._look()
        return replaced

    def counters(self) -> dict[str, Any]:
        """Constants that forward changes in Python, such as a number that counts its calls."""
        places = self._places()
        values = {key: places[key[0]].get(key[1], None) for key in self._changed_once if key[0] in places}
        return {self._label(key): value for key, value in values.items() if type(value) in (bool, int, float, str)}

    def generators(self) -> list[Any]:
        """Those that forward may draw from on the host, beside the global ones."""
        values = [*self._settings.values(), *chain.from_iterable(map(dict.values, self._attributes))]
        found = [one for one in values if issubclass(type(one), tuple(GENERATOR_STATES))]
        found = [one for one in found if not isinstance(one, random.SystemRandom)]  # it has no state
        return [one for one in found if not isinstance(one, torch.Generator) or one.device.type == "cpu"]

    def leaves_out_layers(self) -> bool | None:
        """Whether a model of `transformers` does by chance; None if it cannot. It draws numbers also where the chance is 0."""
        configurations = [vars(one["config"]) for one in self._attributes if hasattr(one.get("config"), "__dict__")]
        places = [*self._attributes, *configurations]
        chances = [value for place in places for name, value in place.items() if name.endswith("layerdrop")]
        return any(chances) if chances else None

    def renew_gradient_nodes(self) -> None:
        """Between passes on different streams: autograd adds up a parameter's gradients on the stream of the pass that made its
        node, for as long as an output of that pass is kept, and a recording cannot wait for another stream.

        A tensor that has had another dtype gets a new node. Hooks that are registered on tensors stay, those on nodes do not.
        """
        for tensor in self._tensors:
            if tensor.requires_grad and tensor.is_leaf and _has_address(tensor) and _node_is_kept(tensor):
                data = tensor.data
                other = torch.float16 if data.dtype is torch.float32 else torch.float32
                tensor.data = torch.empty(0, dtype=other, device=data.device)
                tensor.data = data

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Around a step: what forward puts in the place of buffers or parameters' memory is written into what was there."""
        buffers = [(one._buffers, dict(one._buffers)) for one in self._modules if isinstance(one._buffers, dict)]
        memory = [(one, one.data) for one in self._placed]
        yield
        with torch.no_grad():
            for table, before in buffers:
                for name, old in before.items():
                    new = table.get(name)
                    if old is not None and new is not None and new is not old and _is_alike(old, new):
                        table[name] = old.copy_(new)
            for tensor, data in memory:
                if tensor.data_ptr() != data.data_ptr() and _is_alike(data, tensor):
                    data.copy_(tensor)
                    tensor.data = data

    def undo(self) -> Callable[[], None]:
        """To call after a recording that failed: what forward has set meanwhile was never computed."""
        attributes, memory = attributes_of(self._modules), [(one, one.data) for one in self._placed]

        def put_back() -> None:
            restore(attributes)
            for tensor, data in memory:
                if tensor.data_ptr() != data.data_ptr():
                    tensor.data = data

        return put_back

    def memory(self) -> list[torch.Tensor]:
        """All that forward may read of the modules, for as long as this list is kept."""
        return [
            leaf.detach()
            for leaf in tree_leaves([self._attributes, *self._settings.values()])
            if issubclass(type(leaf), torch.Tensor) and not is_lazy(leaf)
        ]

    def _look_again(self) -> str:
        """What else than settings differs now, in words."""
        entries, placed = self._entries, list(zip(self._placed, self._addresses, strict=True))
        self._look()
        if not are_same_objects(entries, self._entries):
            return "a parameter, buffer or layer"
        moved = [one for one, address in placed if _has_address(one) and one.data_ptr() != address]
        return "the memory of a parameter or buffer" if moved else ""

    def _read_settings(self) -> dict[Key, Any]:
        attributes = {
            (id(module), name): value
            for module, attributes in zip(self._modules, self._attributes, strict=True)
            for name, value in attributes.items()
            if name not in OF_EVERY_MODULE and not (type(module) is nn.Linear and name in SIZES_OF_WEIGHT)
        }
        settings = {key: value for key, value in attributes.items() if isinstance(value, SETTINGS)}
        return {key: value for key, value in (settings | self._read_outside()).items() if key not in self._written}

    def _find_outside(self) -> dict[Key, Variable]:
        return {(id(one.place), one.name): one for one in outside_variables(self._roots)}

    def _read_outside(self) -> dict[Key, Any]:
        """Values of any type: those that are not constants are compared by identity."""
        return {key: one.place.get(one.name, _MISSING) for key, one in self._outside.items()}

    def _places(self) -> dict[int, Any]:
        """Where attributes and variables are, by the first half of their keys."""
        modules = {id(module): attributes for module, attributes in zip(self._modules, self._attributes, strict=True)}
        return modules | {id(one.place): one.place for one in self._outside.values()}

    def _was_there(self, key: Key) -> bool:
        """Whether forward may have read it before it was set: a variable, or an attribute that the class has."""
        classes = (type(module) for module in self._modules if id(module) == key[0])
        return key in self._outside or any(hasattr(kind, key[1]) for kind in classes)

    def _label(self, key: Key) -> str:
        if key in self._outside:
            return f"{key[1]} in {self._outside[key].reader}"
        kinds = [type(module).__name__ for module in self._modules if id(module) == key[0]]
        return ".".join([*kinds, key[1]])


def _has_address(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_nested
    return strided and not (is_traceable_wrapper_subclass(tensor) or is_lazy(tensor))


def _is_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether one can be written into the memory of the other."""
    same = old.shape == new.shape and old.dtype is new.dtype and old.device == new.device
    return same and _has_address(old) and _has_address(new)


def _node_is_kept(tensor: torch.Tensor) -> bool:
    """Whether the node that adds up the gradients of a leaf is in use, as by a graph that lives."""
    _gradient_node(tensor).metadata[_MISSING] = True
    return _gradient_node(tensor).metadata.pop(_MISSING, False)  # else it is another one


@torch.enable_grad()
def _gradient_node(tensor: torch.Tensor) -> Any:
    (node, _), *_ = tensor.expand_as(tensor).grad_fn.next_functions  # type: ignore[union-attr]
    return node
