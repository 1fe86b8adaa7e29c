"""What a trace must leave as it was: all that the attributes of modules lead to, and the generators of random numbers."""

from __future__ import annotations

import operator
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.fuse.refused import RefusedError
from onelaunch.rng import numpy_words

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
        if isinstance(value, (*CONTAINERS, tuple)):
            items: Any = value.values() if isinstance(value, dict) else value
        else:
            items = attributes_of(value).values()
        if len(items) <= LONGEST:
            left.extend((name, item) for item in items)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a plain object, such as a namespace, as the dictionary that holds them."""
    if isinstance(value, (type, types.ModuleType)) or type(value).__module__.partition(".")[0] in _LIBRARIES:
        return {}
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def unchanged(modules: Iterable[nn.Module], named: dict[str, Any]) -> Iterator[None]:
    """Puts back what the block changes of the modules' attributes and all they hold, and of what is `named`; refuses then.

    The dictionaries of buffers and parameters among them are those of the original model.
    """
    own = [(vars(module), dict(vars(module))) for module in modules]
    contents: dict[int, tuple[str, Any, Any]] = {}
    for attributes in (named, *(attributes for _, attributes in own)):
        for name, value in reached(attributes):
            holder = value if isinstance(value, CONTAINERS) else attributes_of(value)
            if id(holder) not in contents and (holder is value or holder):
                contents[id(holder)] = name, holder, _copy(holder)
    random_state, numpy_state, words = random.getstate(), np.random.get_state(), numpy_words()  # noqa: NPY002
    changed: list[str] = []
    try:
        yield
    finally:
        for name, holder, old in contents.values():
            if not same_contents(holder, old):
                changed.append(name)
                _put_back(holder, old)
        for now, old in own:
            if not same_contents(now, old):
                changed += [name for name in now.keys() | old.keys() if now.get(name, old) is not old.get(name, old)]
                _put_back(now, old)
        drawn = random.getstate() != random_state or numpy_words() != words
        random.setstate(random_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
    if changed:
        what = {"_buffers": "buffers", "_parameters": "parameters", "_modules": "children"}.get(changed[0])
        raise RefusedError(
            f"its forward replaces its {what}" if what else f"its forward changes its attribute {changed[0]}"
        )
    if drawn:
        raise RefusedError("draws random numbers in Python")


def _copy(holder: Any) -> Any:
    kind = next(kind for kind in CONTAINERS if isinstance(holder, kind))
    return kind(holder)  # of a subclass too: its own copy may do anything


def _put_back(holder: Any, old: Any) -> None:
    if isinstance(holder, dict) and list(holder) == list(old):
        holder.update(old)  # never empty in between: another thread may be reading it
        return
    holder.clear()
    holder.extend(old) if isinstance(holder, (list, deque)) else holder.update(old)


def same_contents(now: Any, old: Any) -> bool:
    if len(now) != len(old) or isinstance(now, set):
        return bool(now == old)
    if isinstance(now, (list, deque)):
        return not any(map(operator.is_not, now, old))
    return all(map(operator.is_, now.values(), old.values())) and list(now) == list(old)


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
