"""Whether a trace still says what the modules do: the mode, hooks, children and attributes it was made under."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from onelaunch.fuse.operations import hooked
from onelaunch.fuse.tracing import CONSTANTS

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_ABSENT = object()


class Guard:
    """Holds while the modules watched are as they were. A check costs about half a microsecond a module."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.watched = [
            (
                module,
                vars(module),
                len(vars(module)),
                _public(vars(module)),
                tuple((name, value) for name, value in vars(module).items() if name not in _INTERNAL),
                tuple(module._modules.values()),
                hooked(module),
            )
            for module in modules
        ]

    def holds(self) -> bool:
        for module, attributes, count, public, values, children, had_hook in self.watched:
            if hooked(module) is not had_hook:
                return False
            # A new attribute may hide one of the class. Private ones are torch's own: torch.compile adds some.
            if len(attributes) != count and _public(attributes) != public:
                return False
            for name, value in values:
                now = attributes.get(name, _ABSENT)
                if now is not value and not _same(now, value):
                    return False
            if children:
                now_children = attributes["_modules"].values()
                if len(now_children) != len(children):
                    return False
                for child, now in zip(children, now_children, strict=True):
                    if child is not now:
                        return False
        return True


def _public(attributes: dict[str, Any]) -> int:
    return sum(1 for name in attributes if not name.startswith("_"))


def _same(now: Any, value: Any) -> bool:
    return type(now) is type(value) and isinstance(value, CONSTANTS) and bool(now == value)
