"""A second module tree over the same parameters, buffers and hooks.

Modules are copied one by one without their constructor. The dictionaries that hold parameters, buffers and hooks are the
originals' own, not copies: a device move, a loaded state or a new hook on one tree is at once that of the other. Hooks on the
state are the exception where they know their module: those of the copy act on the copy.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections import OrderedDict
from typing import Any, TypeVar, cast

import torch
from torch import nn

from onelaunch.fuse.reconnect import Reconnected

Model = TypeVar("Model", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_SHARED = frozenset(vars(nn.Module())) - frozenset(_STATE_HOOKS)


def twin(root: Model) -> Model:
    """A tree of the same classes that shares all tensors with `root`, but none of its module objects.

    RefusedError where the tree holds its modules also in a way that cannot be had twice.
    """
    copies: dict[int, nn.Module] = {}
    for module in root.modules():
        # What cannot be taken apart is in both trees, the same one.
        copies[id(module)] = module if sealed(module) else object.__new__(type(module))
    opened = [module for module in root.modules() if copies[id(module)] is not module]
    held = [value for module in opened for name, value in vars(module).items() if name not in _SHARED]
    held += [child for module in opened for child in module._modules.values()]  # perhaps a weak proxy of one
    reconnected = Reconnected(root, held, copies)
    for module in opened:
        copy = copies[id(module)]
        attributes = {name: value if name in _SHARED else reconnected(value) for name, value in vars(module).items()}
        attributes["_modules"] = {name: reconnected(child) for name, child in module._modules.items()}
        vars(copy).update(attributes)
        for name in _HOOKS:
            _SharedHooks.share(name, module, copy)
    return cast(Model, copies[id(root)])


class _SharedHooks(OrderedDict[int, Any]):
    """Hooks of a module and its copies.

    Whether backward hooks are full ones, which torch notes in the module, is told to all of these. A hook that is registered
    through one and then made again for another counts once: libraries put theirs on a model when it first needs them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: list[weakref.ref[nn.Module]] = []
        self.registered: dict[int, weakref.ref[nn.Module]] = {}  # by handle: through which module

    @classmethod
    def share(cls, name: str, module: nn.Module, copy: nn.Module) -> None:
        hooks = vars(module)[name]
        if not isinstance(hooks, cls):
            if type(hooks) is not OrderedDict:  # somebody's own
                return
            # Handles to remove a hook know this very dictionary, as do other copies.
            if hooks or "shared" in vars(hooks):
                vars(hooks)["shared"] = True
                return
            hooks = vars(module)[name] = cls()
            hooks.modules = [weakref.ref(module)]
        vars(copy)[name] = hooks
        hooks.modules = [*(known for known in hooks.modules if known() is not None), weakref.ref(copy)]

    def __setitem__(self, handle: int, hook: Any) -> None:
        through = sys._getframe(1).f_locals.get(
            "self"
        )  # the caller is a method of the module: register_forward_hook, say
        if isinstance(through, nn.Module):
            if any(self.registered[known]() is not through and _alike(self[known], hook) for known in self.registered):
                return
            self.registered[handle] = weakref.ref(through)
        super().__setitem__(handle, hook)
        modules = [module for known in self.modules if (module := known()) is not None]
        noted = next((m._is_full_backward_hook for m in modules if m._is_full_backward_hook is not None), None)
        for module in modules:
            module._is_full_backward_hook = noted

    def __delitem__(self, handle: int) -> None:
        super().__delitem__(handle)
        self.registered.pop(handle, None)

    def move_to_end(self, key: int, last: bool = True) -> None:
        if key in self:  # else it counted as one that is there
            super().move_to_end(key, last)

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())  # a copy is a model by itself


def _alike(one: Any, other: Any) -> bool:
    """Whether two functions are one, or the same code over the same values."""
    if not isinstance(one, types.FunctionType) or not isinstance(other, types.FunctionType):
        return bool(one == other)
    cells = one.__closure__ or (), other.__closure__ or ()
    return one.__code__ is other.__code__ and all(
        a is b or (type(a) is type(b) and isinstance(a, (bool, int, str)) and a == b)
        for a, b in zip(*(map(_content, held) for held in cells), strict=True)
    )


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
