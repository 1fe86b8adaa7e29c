"""What functions read from outside: global variables, and those of functions around them, such as a weight that a loss has."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

NOT_FOLLOWED = {"torch", "onelaunch", "numpy", "triton"}  # packages whose variables do not change


class Closure:
    """The variables of the functions around a function."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str, default: Any) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # it has no value yet
            return default


class Variable(NamedTuple):
    place: dict[str, Any] | Closure
    name: str
    reader: str  # the function that reads it


def outside_variables(roots: Iterable[Any]) -> list[Variable]:
    """What these functions, or the forward of these modules and their layers, read from outside; also through functions and
    methods that they call by name. Variables of any kind: the caller looks at their values.
    """
    waiting: list[tuple[Any, type | None]] = []
    for root in roots:
        if isinstance(root, nn.Module):
            waiting += [(getattr(kind, "forward", None), kind) for kind in {type(one) for one in root.modules()}]
        else:
            waiting.append((root, None))
    seen: set[FunctionType] = set()
    found: dict[tuple[int, str], Variable] = {}
    while waiting:
        function, owner = waiting.pop()
        if isinstance(function, partial):
            function = function.func
        if isinstance(function, MethodType):
            owner, function = type(function.__self__), function.__func__
        if not isinstance(function, FunctionType) or not _is_followed(function) or function in seen:
            continue
        seen.add(function)
        names, attributes = _names(function.__code__)
        places: list[tuple[dict[str, Any] | Closure, str]]
        places = [(function.__globals__, name) for name in names & function.__globals__.keys()]  # others are built in
        closure = Closure(function)
        places += [(closure, name) for name in closure.cells]
        for place, name in places:
            value = place.get(name, None)
            if isinstance(value, FunctionType | MethodType | partial):
                waiting.append((value, owner))
            else:
                found.setdefault((id(place), name), Variable(place, name, function.__qualname__))
        waiting += [(getattr(owner, name, None), owner) for name in attributes if owner is not None]
    return list(found.values())


def _is_followed(function: FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] not in NOT_FOLLOWED


def _names(code: CodeType) -> tuple[set[str], set[str]]:
    """(global variables, attributes) that this code reads, and functions inside it."""
    names: set[str] = set()
    attributes: set[str] = set()
    for one in _codes(code):
        for instruction in dis.get_instructions(one):
            if instruction.opname == "LOAD_GLOBAL":
                names.add(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                attributes.add(instruction.argval)
    return names, attributes


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
