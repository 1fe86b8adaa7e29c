"""What a trace must leave as it was: all that the attributes of modules lead to, and the generators of random numbers."""

from __future__ import annotations

import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.fuse.refused import RefusedError
from onelaunch.rng import numpy_random_state

CONTAINERS = (list, dict, set, deque)
MOST = 10_000  # values that are looked at; a vocabulary or a data set is not state of a forward
LONGEST = 1_000  # of a container that is looked into; a longer one is compared as it is
_MOVING = (Iterator, random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
# Objects of these libraries are no state of the model, and may be changed by other threads.
_LIBRARIES = frozenset({"torch", "numpy", "onelaunch", "logging", "threading", "builtins", "functools", "concurrent"})


def moves(value: Any) -> bool:
    """Whether reading from a value changes it."""
    return isinstance(value, _MOVING)


def reached(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values named, and those that containers and plain objects among them hold, each with the name it starts from."""
    seen: set[int] = set()
    left = deque(named.items())
    while left and len(seen) < MOST:
        name, value = left.popleft()
        if id(value) in seen or isinstance(value, (nn.Module, torch.Tensor, str, int, float, types.NoneType)):
            continue
        seen.add(id(value))
        yield name, value
        held = value if isinstance(value, (*CONTAINERS, tuple)) else attributes_of(value)
        if _plain(held).__len__(held) <= LONGEST:
            left.extend((name, item) for item in contents(held))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, such as a namespace, as the dictionary that holds them."""
    if isinstance(value, (type, types.ModuleType)) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return {}
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


class Attributes:
    """What the attributes of modules, and all they lead to, are now; with what is `named`."""

    def __init__(self, modules: Iterable[nn.Module], named: dict[str, Any] | None = None) -> None:
        self.own = [(vars(module), dict(vars(module))) for module in modules]
        self.held: dict[int, tuple[str, Any, Any]] = {}
        for attributes in (named or {}, *(attributes for _, attributes in self.own)):
            for name, value in reached(attributes):
                holder = value if isinstance(value, CONTAINERS) else attributes_of(value)
                if id(holder) not in self.held and (holder is value or holder):
                    self.held[id(holder)] = name, holder, _copy(holder)

    def put_back(self) -> list[str]:
        """Undoes what has changed since, and says which attributes that was."""
        changed = []
        for name, holder, old in self.held.values():
            if not same_contents(holder, old):
                changed.append(name)
                _put_back(holder, old)
        for now, old in self.own:
            if not same_contents(now, old):
                changed += [name for name in now.keys() | old.keys() if now.get(name, old) is not old.get(name, old)]
                _put_back(now, old)
        return changed


@contextmanager
def unchanged(modules: Iterable[nn.Module], named: dict[str, Any]) -> Iterator[None]:
    """Puts back what the block changes of the modules' attributes and all they hold, and of what is `named`; refuses then.

    The dictionaries of buffers and parameters among them are those of the original model.
    """
    before = Attributes(modules, named)
    changed: list[str] = []
    try:
        with numbers_put_back() as drawn:
            yield
    finally:
        changed = before.put_back()
    if changed:
        what = {"_buffers": "buffers", "_parameters": "parameters", "_modules": "children"}.get(changed[0])
        raise RefusedError(
            f"its forward replaces its {what}" if what else f"its forward changes its attribute {changed[0]}"
        )
    if drawn:
        raise RefusedError("draws random numbers in Python")


@contextmanager
def numbers_put_back() -> Iterator[list[str]]:
    """Puts back the generators of Python and NumPy; the list given has something in it afterwards if one was moved."""
    drawn: list[str] = []
    random_state, numpy_state, words = random.getstate(), np.random.get_state(), numpy_random_state()  # noqa: NPY002
    try:
        yield drawn
    finally:
        drawn += ["random"] * (random.getstate() != random_state) + ["numpy"] * (numpy_random_state() != words)
        random.setstate(random_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _plain(holder: Any) -> Any:
    """The built-in class of a container. Its methods do what they say; those of a subclass may make or load what they give."""
    return next(kind for kind in (list, OrderedDict, dict, set, deque, tuple) if isinstance(holder, kind))


def contents(holder: Any) -> Iterable[Any]:
    """What a container holds, as it lies there; of a dictionary the values."""
    kind = _plain(holder)
    return kind.values(holder) if isinstance(holder, dict) else kind.__iter__(holder)


def _copy(holder: Any) -> Any:
    kind = _plain(holder)
    return dict(kind.items(holder)) if isinstance(holder, dict) else kind(kind.__iter__(holder))


def _put_back(holder: Any, old: Any) -> None:
    kind = _plain(holder)
    if not isinstance(holder, dict):
        kind.clear(holder)
        kind.update(holder, old) if isinstance(holder, set) else kind.extend(holder, old)
        return
    if list(kind.__iter__(holder)) != list(old):  # else never empty in between: another thread may be reading it
        kind.clear(holder)
    for name, value in old.items():
        kind.__setitem__(holder, name, value)


def same_contents(now: Any, old: Any) -> bool:
    kind = _plain(now)
    if kind.__len__(now) != len(old) or isinstance(now, set):
        return bool(kind.__eq__(now, old))
    if isinstance(now, dict) and list(kind.__iter__(now)) != list(old):
        return False
    return not any(map(operator.is_not, contents(now), contents(old)))


@contextmanager
def generators_unmoved() -> Iterator[None]:
    """Puts back the states of torch's generators, and refuses where the block moved one."""
    generators = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators += torch.cuda.default_generators
    before = [generator.get_state() for generator in generators]
    moved = False
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            with torch._C.DisableTorchFunction():  # a trace inside a trace: the outer one refuses what has no proxy
                if not torch.equal(generator.get_state(), state):
                    moved = True
                    generator.set_state(state)
    if moved:
        raise RefusedError("moves a random generator of torch")
