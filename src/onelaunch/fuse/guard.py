"""Whether a trace still says what the modules do: the mode, hooks, children and attributes it was made under."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

from torch import nn

from onelaunch.fuse.arguments import CONSTANTS
from onelaunch.fuse.asked import Asked
from onelaunch.fuse.operations import hooked, hooks_of

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_OF_COMPILE = frozenset({"_is_torch_compile"})  # what torch.compile sets on a module
_ABSENT = object()
Tensors = dict[str, Any]


class Guard:
    """Holds while the modules watched are as they were. A check costs half a microsecond a module.

    Of `others` (called as a whole, or held and not called) only what a graph around them may have read: mode, class, children
    and which of their tensors are None. Tensors in `tied` that were one are to stay one: a graph knows them by one name.
    What was `asked` of tensors is to be answered as it was.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        others: Iterable[nn.Module] = (),
        tied: Iterable[nn.Module] = (),
        asked: Iterable[Asked] = (),
    ) -> None:
        modules, others = list(modules), list(others)
        every = [*modules, *others]
        self.inside, self.others = modules, others
        self.hooked = [module for module in modules if hooked(module)]
        self.empty: list[dict[Any, Any]] = [
            hooks for module in modules if not hooked(module) for hooks in hooks_of(module)
        ]
        self.values = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if name not in _INTERNAL
        ]
        self.values += [(vars(module), "training", module.training) for module in others]
        self.counts = [(vars(module), len(vars(module)), frozenset(vars(module))) for module in modules]
        self.modules, self.kinds = every, [type(module) for module in every]
        held: list[Tensors] = [tensors for module in every for tensors in (module._parameters, module._buffers)]
        self.empty += [tensors for tensors in held if not tensors]
        self.held = [tensors for tensors in held if tensors]
        self.nones = _nones(self.held)
        self.children = [
            (module._modules, list(module._modules), list(module._modules.values()))
            for module in every
            if module._modules
        ]
        self.ties = _ties(tied)
        self.asked = list(asked)

    def renewed(self) -> Guard:
        """One for the same modules as they are now; of what was asked of tensors it knows nothing."""
        return Guard(self.inside, self.others)

    def holds(self) -> bool:
        if any(map(len, self.empty)):  # as booleans, dynamo of torch 2.11 takes them for true
            return False
        for module in self.hooked:
            if not hooked(module):
                return False
        if list(map(type, self.modules)) != self.kinds:
            return False
        for attributes, name, value in self.values:
            now = attributes.get(name, _ABSENT)
            if now is not value and not _same(now, value):
                return False
        for attributes, count, names in self.counts:
            # A new attribute may hide one of the class, or be asked for with a default.
            if len(attributes) != count and set(attributes) - names - _OF_COMPILE:
                return False
        if _nones(self.held) != self.nones:
            return False
        for now_children, names_before, children in self.children:
            if list(now_children) != names_before or any(map(operator.is_not, now_children.values(), children)):
                return False
        for tensors, name, question, arguments, answer in self.asked:
            tensor = tensors.get(name)
            if tensor is None:
                return False
            says = getattr(tensor, question)
            if (says if arguments is None else says(*arguments)) != answer:
                return False
        return all(tensors.get(name) is others.get(other) for tensors, name, others, other in self.ties)


def _nones(held: list[Tensors]) -> list[bool]:
    return list(map(operator.is_, chain.from_iterable(map(dict.values, held)), repeat(None)))


def _ties(modules: Iterable[nn.Module]) -> list[tuple[Tensors, str, Tensors, str]]:
    """The places of tensors that are at several, each with the first."""
    first: dict[int, tuple[Tensors, str]] = {}
    found = []
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None and id(value) in first:
                    found.append((*first[id(value)], tensors, name))
                first.setdefault(id(value), (tensors, name))
    return found


def _same(now: Any, value: Any) -> bool:
    if type(now) is not type(value) or not isinstance(value, CONSTANTS) or now != value:
        return False
    return not isinstance(value, float) or math.copysign(1, now) == math.copysign(1, value)  # 0.0 and -0.0
