"""What functions read from outside: global variables, and those of functions around them, such as a weight that a loss has."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

NOT_FOLLOWED = {"torch", "onelaunch", "numpy", "triton", "math"}  # packages whose variables do not change
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


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
    paths: set[tuple[str, ...]]  # a variable, an attribute that is read of it, one of that, and so on


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
        """A function to follow, or something that has some. Objects are told by their types, which runs no code of theirs."""
        kind = type(value)
        if issubclass(kind, nn.Module):
            for module in value.modules():
                if id(module) not in self._seen:
                    self._seen.add(id(module))
                    self.waiting += self._methods_of(type(module), "forward", "__call__")
                    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
                    self.waiting += [one for one in (*vars(module).values(), *hooks) if _is_function(one)]
        elif issubclass(kind, type):
            if issubclass(value, torch.autograd.Function):
                self.waiting += self._methods_of(value, "forward", "backward")
        elif _is_function(value):
            self.waiting.append(value)
        elif isinstance(call := inspect.getattr_static(kind, "__call__", None), FunctionType):
            self.waiting.append(MethodType(call, value))

    def follow(self, function: Any) -> None:
        if isinstance(function, partial):
            for value in (function.func, *function.args, *function.keywords.values()):
                self.add(value)
            return
        owner = getattr(function, "__self__", None)
        function = function.__func__ if isinstance(function, MethodType) else function
        key = function, id(owner)
        if not isinstance(function, FunctionType) or key in self._seen:
            return
        self._seen.add(key)
        for name in ("__wrapped__", "_torchdynamo_orig_callable"):
            self.add(vars(function).get(name))
        if not _is_followed(function.__globals__.get("__name__")):
            return
        if owner is not None:
            self._methods_of(owner if isinstance(owner, type) else type(owner))
        reads, closure, variables = _reads(function.__code__), Closure(function), function.__globals__
        values: dict[str, Any] = {}
        for name in reads.variables:
            if name in variables or not hasattr(builtins, name):
                values[name] = self._find(variables, name, function)
        for name in closure.cells:
            values[name] = self._find(closure, name, function)
        if owner is not None and function.__code__.co_varnames:
            values[function.__code__.co_varnames[0]] = owner
        for first, *names in reads.paths:
            value = values.get(first)
            for name in names:
                value = self._attribute(value, name, function)
        for name in reads.attributes:
            self.waiting += self._methods.get(name, [])
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(value)

    def _find(self, place: Place, name: str, function: FunctionType) -> Any:
        self.found.setdefault((id(place), name), Variable(place, name, function.__qualname__))
        value = place.get(name, None)
        self.add(value)
        return value

    def _attribute(self, value: Any, name: str, function: FunctionType) -> Any:
        """The value of an attribute of a module, of a class, or of an object such as a configuration, where it is found."""
        if issubclass(type(value), nn.Module) and name in OF_EVERY_MODULE:
            return None  # such as its mode, which its owner watches
        places = _places(value)
        place = next((one for one in places if name in one), None)
        found = None if place is None else place[name]
        method = _function_of(found)
        if method is not None and place is not places[0] and not isinstance(value, ModuleType | type):
            self.waiting.append(MethodType(method, value))
            return None
        if places and place is not places[0]:  # the object may get one of its own
            self._find(places[0], name, function)
        return None if place is None else self._find(place, name, function)

    def _methods_of(self, kind: type, *names: str) -> list[FunctionType]:
        """The methods of this class that have these names; all of them can be found by name from now on."""
        found = []
        for name, value in chain.from_iterable(one.items() for one in _tables_of(kind)):
            method = _function_of(value)
            if method is not None:
                known = self._methods.setdefault(name, [])
                if method not in known:
                    known.append(method)
                if name in names:
                    found.append(method)
        return found


def _is_function(value: Any) -> bool:
    return issubclass(type(value), FunctionType | MethodType | partial)


def _function_of(member: Any) -> FunctionType | None:
    """The function of a method or property of a class."""
    found = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    return found if isinstance(found, FunctionType) else None


def _tables_of(kind: type) -> list[Mapping[str, Any]]:
    """The members of a class and of its bases, as far as their packages are followed."""
    return [vars(base) for base in kind.__mro__ if base is not object and _is_followed(base.__module__)]


def _is_followed(package: Any) -> bool:
    return str(package).split(".")[0] not in NOT_FOLLOWED


def _places(value: Any) -> list[Mapping[str, Any]]:
    """Where the attributes of a value are, its own first; nothing for values that have none that could matter."""
    kind = type(value)
    if _is_function(value) or issubclass(kind, torch.Tensor) or value is None:
        return []
    if issubclass(kind, ModuleType):
        return [vars(value)] if _is_followed(vars(value).get("__name__")) else []
    if issubclass(kind, type):
        return _tables_of(value)
    slot = next((vars(base)["__dict__"] for base in kind.__mro__ if "__dict__" in vars(base)), None)
    if not isinstance(slot, GetSetDescriptorType | MemberDescriptorType):  # such as a property
        return []
    own = slot.__get__(value)
    inside = [own["_modules"], own["_parameters"], own["_buffers"]] if issubclass(kind, nn.Module) else []
    return [own, *inside, *_tables_of(kind)]


def _reads(code: CodeType) -> Reads:
    reads = Reads(set(), set(), set())
    for one in _codes(code):
        path: tuple[str, ...] = ()  # that the instructions before have loaded
        for instruction in dis.get_instructions(one):
            kind, name = instruction.opname, instruction.argval
            if kind.startswith("LOAD_SUPER"):  # a method of `super()`, since Python 3.12
                reads.attributes.add(name)
            if kind in ("LOAD_ATTR", "LOAD_METHOD"):
                reads.attributes.add(name)
                path = (*path, name) if path else ()
                if path:
                    reads.paths.add(path)
                continue
            if kind == "LOAD_GLOBAL":
                reads.variables.add(name)
            loads = kind in ("LOAD_GLOBAL", "LOAD_DEREF") or kind.startswith("LOAD_FAST")
            path = ((name[-1] if isinstance(name, tuple) else name),) if loads else ()
    return reads


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
