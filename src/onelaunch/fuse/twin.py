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
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
    if "dynamo_ctx" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled"
    hooks = (hook for inner in module.modules() for held in _HOOKS for hook in vars(inner).get(held, {}).values())
    return "held by a hook of its own" if any(_holds(hook, module) for hook in hooks) else None


def _holds(function: Any, module: nn.Module) -> bool:
    """Whether a function is a method of the module, or a closure over it."""
    if isinstance(function, functools.partial):
        return any(value is module for value in function.args) or _holds(function.func, module)
    if isinstance(function, types.MethodType):
        return function.__self__ is module
    return any(_content(cell) is module for cell in getattr(function, "__closure__", None) or ())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not set yet
        return None


def _reconnected(value: Any, copies: dict[int, nn.Module]) -> Any:
    """`value` with modules of the tree exchanged for their copies; the same object where it holds none."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in copies:
        return types.MethodType(value.__func__, copies[id(value.__self__)])
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _closed_over(value, copies)
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


def _closed_over(function: types.FunctionType, copies: dict[int, nn.Module]) -> types.FunctionType:
    """`function` with modules of the tree among the variables it closes over exchanged; all others stay shared."""
    cells = function.__closure__ or ()
    held = [_content(cell) for cell in cells]
    if not any(isinstance(value, nn.Module) and id(value) in copies for value in held):
        return function
    new = [
        types.CellType(copies[id(value)]) if isinstance(value, nn.Module) and id(value) in copies else cell
        for cell, value in zip(cells, held, strict=True)
    ]
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(new)
    )
    vars(copy).update(vars(function))
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
