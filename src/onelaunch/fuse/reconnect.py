"""What the modules of a tree hold beside their children, for a second tree: made anew where it leads to a module of the first.

A model may keep its modules a second time, in a container, a helper object, a closure or a weak reference, and reach them that
way. In the second tree these must lead to the second tree, or `eval()` does not reach what runs. It is what `copy.deepcopy`
does, except that everything which leads to no module stays the same object in both trees.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

from onelaunch.fuse.refused import RefusedError

_ATOMS = (str, bytes, int, float, complex, type, types.NoneType, types.ModuleType, types.CodeType, torch.Tensor)
_WEAK = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
# Objects of these libraries, other than modules, are no part of a model: a logger, a thread, the graph of a GraphModule.
_LIBRARIES = frozenset({"torch", "onelaunch", "logging", "threading", "concurrent", "multiprocessing", "asyncio"})
_MUTABLE = (list, OrderedDict, defaultdict, dict, set, deque)
_MADE_BY_PYTHON = (object.__new__, types.SimpleNamespace.__new__)  # an instance is its attributes and nothing else


class Reconnected:
    """Gives for a value that the modules hold the one that their copies hold; RefusedError where that cannot be made."""

    def __init__(self, root: nn.Module, held: Iterable[Any], copies: dict[int, nn.Module]) -> None:
        self.root, self.copies = root, copies
        self.made: dict[int, Any] = {}
        self.seen: dict[int, Any] = {}  # which keeps them alive: their identities stay theirs
        self.leading = self._leading(held)

    def __call__(self, value: Any) -> Any:
        if id(value) in self.copies:
            return self.copies[id(value)]
        if id(value) not in self.leading:
            return value
        if id(value) not in self.made:
            made = self._made(value)
            self.made.setdefault(id(value), made)  # or it leads to itself, and was made on the way
        return self.made[id(value)]

    def _leading(self, held: Iterable[Any]) -> set[int]:
        """The identities of what leads to a module that has a copy."""
        holders: dict[int, list[int]] = {}
        left, found = list(held), []
        while left:
            value = left.pop()
            if _is_atom(value) or id(value) in self.seen or self._is_copied(value):
                continue
            self.seen[id(value)] = value
            for part in self._parts(value):
                if self._is_copied(part):
                    found.append(id(value))
                elif not _is_atom(part):
                    holders.setdefault(id(part), []).append(id(value))
                    left.append(part)
        leading: set[int] = set()
        while found:
            one = found.pop()
            if one not in leading:
                leading.add(one)
                found += holders.get(one, ())
        return leading

    def _is_copied(self, value: Any) -> bool:
        return self.copies.get(id(value), value) is not value

    def _parts(self, value: Any) -> Iterable[Any]:
        """What a value consists of, as far as that is its own: not the globals of a function."""
        if type(value) in _WEAK:
            module = _referred(value)
            return (module,) if id(module) in self.copies else ()
        if isinstance(value, types.FunctionType):
            named = (value.__kwdefaults__ or {}, vars(value))
            return (
                *(value.__closure__ or ()),
                *(value.__defaults__ or ()),
                *(v for held in named for v in held.values()),
            )
        if isinstance(value, nn.Module):  # of another tree: perhaps the one that this tree is a part of
            return () if any(inner is self.root for inner in value.modules()) else vars(value).values()
        if type(value).__module__.partition(".")[0] in _LIBRARIES and type(value) is not _WrappedHook:
            return ()
        return gc.get_referents(value)

    def _made(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is weakref.ref:
            return weakref.ref(self(value()), value.__callback__)
        if kind in _WEAK:
            return weakref.proxy(self(_referred(value)))
        if kind is types.MethodType:
            return types.MethodType(self(value.__func__), self(value.__self__))
        if kind is types.FunctionType:
            return self._function(value)
        if kind is types.CellType:
            cell = self.made[id(value)] = types.CellType()
            cell.cell_contents = self(value.cell_contents)
            return cell
        if kind is functools.partial:
            pairs = {name: self(item) for name, item in value.keywords.items()}
            return self._with_attributes(functools.partial(self(value.func), *map(self, value.args), **pairs), value)
        if isinstance(value, (tuple, frozenset)):
            plain: Any = tuple if isinstance(value, tuple) else frozenset
            return self._with_attributes(plain.__new__(kind, [self(item) for item in plain.__iter__(value)]), value)
        if isinstance(value, _MUTABLE):
            return self._container(value)
        by_itself = kind.__new__ in _MADE_BY_PYTHON and not isinstance(value, nn.Module)
        if by_itself and not any(hasattr(kind, name) for name in ("__deepcopy__", "__del__")):
            shell = self.made[id(value)] = kind.__new__(kind)
            return self._with_attributes(shell, value)
        raise RefusedError(f"it keeps modules also in a {kind.__name__}, which cannot be made a second time")

    def _container(self, value: Any) -> Any:
        kind: Any = next(kind for kind in _MUTABLE if isinstance(value, kind))
        shell = self.made[id(value)] = kind.__new__(type(value))
        if kind is deque:
            deque.__init__(shell, (), value.maxlen)
        if kind is defaultdict:
            shell.default_factory = self(value.default_factory)
        if isinstance(value, dict):  # by the methods of the built-in class: those of a subclass may do anything
            for name, item in kind.items(value):
                kind.__setitem__(shell, self(name), self(item))
        else:
            add: Callable[[Any, Any], None] = set.add if kind is set else kind.append
            for item in kind.__iter__(value):
                add(shell, self(item))
        return self._with_attributes(shell, value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """The function with other cells and defaults; variables that lead to no module stay shared."""
        cells = tuple(map(self, value.__closure__ or ()))
        if id(value) in self.made:  # one of them holds the function itself
            return self.made[id(value)]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, closure=cells)
        self.made[id(value)] = made
        made.__defaults__ = None if value.__defaults__ is None else tuple(map(self, value.__defaults__))
        pairs = value.__kwdefaults__
        made.__kwdefaults__ = None if pairs is None else {name: self(item) for name, item in pairs.items()}
        made.__doc__, made.__qualname__, made.__module__ = value.__doc__, value.__qualname__, value.__module__
        vars(made).update({name: self(item) for name, item in vars(value).items()})
        return made

    def _with_attributes(self, shell: Any, value: Any) -> Any:
        _attributes(shell).update({name: self(item) for name, item in _attributes(value).items()})
        for kind in type(value).__mro__:
            for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
                if isinstance(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):  # not set yet
                        slot.__set__(shell, self(slot.__get__(value)))
        return shell


def _is_atom(value: Any) -> bool:
    return issubclass(type(value), _ATOMS)  # `isinstance` would ask the value, which may be a proxy of something


def _attributes(value: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}


def _referred(reference: Any) -> Any:
    """What a weak reference or proxy refers to; None if that is gone."""
    try:
        return reference() if type(reference) is weakref.ref else reference.__repr__.__self__
    except ReferenceError:
        return None
