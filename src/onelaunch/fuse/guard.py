"""Whether a trace still says what the modules do: the mode, hooks, children and attributes it was made under."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from onelaunch.fuse.arguments import CONSTANTS
from onelaunch.fuse.operations import hooked, hooks_of

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()


class Guard:
    """Holds while the modules watched are as they were. A check costs a third of a microsecond a module."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self.hooked = [module for module in modules if hooked(module)]
        self.hooks = [hooks for module in modules if not hooked(module) for hooks in hooks_of(module)]
        self.values = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if name not in _INTERNAL
        ]
        self.counts = [(vars(module), len(vars(module)), _public(vars(module))) for module in modules]
        self.children = [(module._modules, list(module._modules.values())) for module in modules if module._modules]

    def holds(self) -> bool:
        if any(self.hooks):
            return False
        for module in self.hooked:
            if not hooked(module):
                return False
        for attributes, name, value in self.values:
            now = attributes.get(name, _ABSENT)
            if now is not value and not _same(now, value):
                return False
        for attributes, count, public in self.counts:
            # A new attribute may hide one of the class. Private ones are torch's own: torch.compile adds some.
            if len(attributes) != count and _public(attributes) != public:
                return False
        for now_children, children in self.children:
            if len(now_children) != len(children):
                return False
            for now, child in zip(now_children.values(), children, strict=True):
                if now is not child:
                    return False
        return True


def _public(attributes: dict[str, Any]) -> int:
    return sum(1 for name in attributes if not name.startswith("_"))


def _same(now: Any, value: Any) -> bool:
    return type(now) is type(value) and isinstance(value, CONSTANTS) and bool(now == value)
