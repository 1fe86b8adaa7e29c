"""What functions read from outside: global variables, and those of functions around them, such as a weight that a loss has."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

NOT_FOLLOWED = {"torch", "onelaunch", "numpy", "triton", "math"}  # packages whose variables do not change


class Closure:
    """The variables of the functions around a function."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def get(self, name: str, default: Any) -> Any:
        try:
            return self.cells[name].cell_contents
        except ValueError:  # it has no value yet
            return default


Place = Mapping[str, Any] | Closure


class Variable(NamedTuple):
    place: Place
    name: str
    reader: str  # the function that reads it


class Reads(NamedTuple):
    """What the code of a function reads, and that of functions inside it."""

    variables: set[str]  # global ones
    attributes: set[str]  # of anything
    pairs: set[tuple[str, str]]  # a variable, and an attribute that is read of it


def outside_variables(roots: Iterable[Any]) -> list[Variable]:
    """What these functions, or the forward of these modules and their layers, read from outside; also through functions that
    they call, methods of their classes, and attributes of variables. Variables of any kind, and such without a value yet.
    """
    search = _Search()
    for root in roots:
        search.add(root)
    while search.waiting:
        search.follow(search.waiting.pop())
    return list(search.found.values())


class _Search:
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.found: dict[tuple[int, str], Variable] = {}
        self._methods: dict[str, list[FunctionType]] = {}  # of all classes met so far, by name
        self._seen: set[Any] = set()

    def add(self, value: Any) -> None:
        """A function to follow, or something that has some."""
        if isinstance(value, nn.Module):
            for module in value.modules():
                if id(module) not in self._seen:
                    self._seen.add(id(module))
                    self.waiting += self._methods_of(type(module), "forward", "__call__")
                    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
                    self.waiting += [one for one in (*vars(module).values(), *hooks) if _is_function(one)]
        elif isinstance(value, type):
            if issubclass(value, torch.autograd.Function):
                self.waiting += self._methods_of(value, "forward", "backward")
        elif _is_function(value):
            self.waiting.append(value)
        elif isinstance(call := inspect.getattr_static(type(value), "__call__", None), FunctionType):
            self.waiting.append(MethodType(call, value))

    def follow(self, function: Any) -> None:
        if isinstance(function, partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self.add(value)
            return
        owner = getattr(function, "__self__", None)
        function = function.__func__ if isinstance(function, MethodType) else function
        key = function, id(owner)
        if not isinstance(function, FunctionType) or key in self._seen or not _is_followed(function.__module__):
            return
        self._seen.add(key)
        if owner is not None:
            self._methods_of(owner if isinstance(owner, type) else type(owner))
        reads, closure = _reads(function.__code__), Closure(function)
        values: dict[str, Any] = {}
        places: list[tuple[Any, str]] = [(function.__globals__, name) for name in reads.variables]
        for place, name in [*places, *((closure, name) for name in closure.cells)]:
            values[name] = self._find(place, name, function)
        if owner is not None and function.__code__.co_varnames:
            values[function.__code__.co_varnames[0]] = owner
        for name, attribute in reads.pairs:
            place = _attributes(values.get(name))
            if attribute in place:
                self._find(place, attribute, function)
        for name in reads.attributes:
            self.waiting += self._methods.get(name, [])
        for value in function.__defaults__ or ():
            self.add(value)

    def _find(self, place: Place, name: str, function: FunctionType) -> Any:
        self.found.setdefault((id(place), name), Variable(place, name, function.__qualname__))
        value = place.get(name, None)
        self.add(value)
        return value

    def _methods_of(self, kind: type, *names: str) -> list[FunctionType]:
        """The methods of this class that have these names; all of them can be found by name from now on."""
        found = []
        for base in kind.__mro__:
            if _is_followed(base.__module__):
                for name, value in vars(base).items():
                    method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                    if isinstance(method, FunctionType):
                        known = self._methods.setdefault(name, [])
                        if method not in known:
                            known.append(method)
                        if name in names:
                            found.append(method)
        return found


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _is_followed(package: str | None) -> bool:
    return (package or "").split(".")[0] not in NOT_FOLLOWED


def _attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of a module of Python, of a class, or of an object such as a configuration."""
    if _is_function(value) or isinstance(value, nn.Module | torch.Tensor) or not hasattr(value, "__dict__"):
        return {}
    package = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return vars(value) if _is_followed(package) else {}


def _reads(code: CodeType) -> Reads:
    reads = Reads(set(), set(), set())
    for one in _codes(code):
        variable = None  # that the instruction before has loaded
        for instruction in dis.get_instructions(one):
            kind, name = instruction.opname, instruction.argval
            if kind == "LOAD_GLOBAL" and not hasattr(builtins, name):
                reads.variables.add(name)
            elif kind in ("LOAD_ATTR", "LOAD_METHOD"):
                reads.attributes.add(name)
                if variable is not None:
                    reads.pairs.add((variable, name))
            loads = kind in ("LOAD_GLOBAL", "LOAD_DEREF") or kind.startswith("LOAD_FAST")
            variable = (name[-1] if isinstance(name, tuple) else name) if loads else None
    return reads


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
