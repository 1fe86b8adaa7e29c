"""A second module tree over the same parameters, buffers and hooks.

Modules are copied one by one without their constructor. The dictionaries that hold parameters, buffers and hooks are the
originals' own, not copies: a device move, a loaded state or a new hook on one tree is at once that of the other.
"""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar, cast

import torch
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def twin(root: Model) -> Model:
    """A tree of the same classes that shares all tensors with `root`, but none of its module objects."""
    copies: dict[int, nn.Module] = {}
    for module in root.modules():
        # What cannot be taken apart is in both trees, the same one.
        copies[id(module)] = module if sealed(module) else object.__new__(type(module))
    for module in root.modules():
        copy = copies[id(module)]
        if copy is module:
            continue
        attributes = {name: _reconnected(value, copies) for name, value in vars(module).items()}
        attributes["_modules"] = {
            name: child if child is None else copies[id(child)] for name, child in module._modules.items()
        }
        vars(copy).update(attributes)
    return cast(Model, copies[id(root)])


def sealed(module: nn.Module) -> str | None:
    """Why a module cannot be taken apart: its code lives in C++, or holds on to this very object."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    # `torch.compile(module)` and `module.compile()`. Asking for the class would import dynamo.
    compiled = "dynamo_ctx" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None
    return "compiled" if compiled else None


def _reconnected(value: Any, copies: dict[int, nn.Module]) -> Any:
    """`value` with modules of the tree exchanged for their copies; the same object where it holds none."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(value.__func__, copies[id(value.__self__)])
    if type(value) in (list, tuple, set):
        items = [_reconnected(item, copies) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        pairs = {name: _reconnected(item, copies) for name, item in value.items()}
        return value if all(pairs[name] is item for name, item in value.items()) else pairs
    if type(value) is functools.partial:
        inner, items, pairs = (_reconnected(part, copies) for part in (value.func, value.args, value.keywords))
        unchanged = inner is value.func and items is value.args and pairs is value.keywords
        return value if unchanged else functools.partial(inner, *items, **pairs)
    return value
