"""What a trial run of a model changes of it, put back: buffers that it writes to, replaces, makes or grows, parameters that
it writes to, and whatever else its attributes lead to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from onelaunch.fuse.state import Attributes, numbers_put_back


@contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    names = [
        (kept, kept.copy())
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # whose names are fixed
        for kept in (module._buffers, module._non_persistent_buffers_set)
    ]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        for kept, before in names:
            kept.clear()
            kept.update(before)  # type: ignore[arg-type]
        with torch.no_grad():
            for buffer, value in values:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
                else:  # resized where it lay
                    buffer.set_(value)  # type: ignore[call-overload]


@contextmanager
def attributes_put_back(model: nn.Module) -> Iterator[None]:
    """Attributes of the modules and what they hold, a list that is appended to, say; and the numbers Python has drawn."""
    before = Attributes(model.modules())
    try:
        with numbers_put_back():
            yield
    finally:
        before.put_back()


@contextmanager
def tensors_put_back(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Parameters, and tensors that are plain attributes. Gives the ones written to, by name.

    They are copied when they are about to be written to: a copy of all of them might be more than memory holds.
    """
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        plain = [(name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)]
        named |= {f"{path}.{name}" if path else name: value for name, value in plain}
    watch = _WatchedWrites(named)
    written: dict[str, torch.Tensor] = {}
    try:
        with watch:
            yield written
    finally:
        written |= {name: named[name] for name in watch.saved}
        for put_back in watch.saved.values():
            put_back()


@contextmanager
def these_put_back(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    saved = [_saved(tensor) for tensor in tensors]
    try:
        yield
    finally:
        for put_back in saved:
            put_back()


def _saved(tensor: torch.Tensor) -> Callable[[], None]:
    """What makes a tensor again what it is now, where it is now: `.data` may be set to other memory meanwhile."""
    here = tensor.detach()
    value = here.clone()

    def put_back() -> None:
        with torch.no_grad():
            here.copy_(value)
        if _memory(tensor) != _memory(here) or tensor.shape != here.shape:
            tensor.data = here

    return put_back


class _WatchedWrites(TorchFunctionMode):
    """Keeps what tensors were before the first call that writes to their memory, through whatever view and `.data`.

    A mode below autograd would see every write. But a function that torch.compile has compiled, called under one, stays
    uncompiled for the rest of the process.
    """

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.named: dict[int | None, dict[str, torch.Tensor]] = {}
        self.saved: dict[str, Callable[[], None]] = {}
        for name, tensor in named.items():
            if (memory := _memory(tensor)) is not None:
                self.named.setdefault(memory, {})[name] = tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _WRITES.fullmatch(getattr(func, "__name__", "")) or "out" in kwargs or kwargs.get("inplace"):
            for tensor in tree_leaves((args, kwargs)):
                for name, held in self.named.pop(_memory(tensor), {}).items():
                    self.saved[name] = _saved(held)
        return func(*args, **kwargs)


# `copy_`, `x[0] = y`, `x += y` and `x.data = y`; not `requires_grad_`, which writes no element.
_WRITES = re.compile(
    r"(?!requires_grad_)\w*[^_]_|__setitem__|__set__|__i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor)__"
)


def _memory(tensor: Any) -> int | None:
    """Whose memory a tensor has; None for what has none of its own."""
    try:
        return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None
    except (NotImplementedError, RuntimeError):  # of a tensor that wraps others
        return None
