"""What a trial run of a model changes of it, put back: buffers that it writes to, replaces, makes or grows, parameters that
it writes to, and whatever else its attributes lead to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onelaunch.fuse.state import Attributes, numbers_put_back


@contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    names = [
        (kept, kept.copy())
        for module in model.modules()
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
        with torch.no_grad():
            for name, value in watch.saved.items():
                if named[name].shape == value.shape:
                    named[name].data.copy_(value)
                else:
                    named[name].data = value


class _WatchedWrites(TorchDispatchMode):
    """Keeps what tensors were before the first write to their memory, through whatever view and `.data`."""

    supports_higher_order_operators = True

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.named: dict[int | None, dict[str, torch.Tensor]] = {}
        self.saved: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            if (memory := _memory(tensor)) is not None:
                self.named.setdefault(memory, {})[name] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # an operation of higher order has none
        if schema is not None and schema.is_mutable:
            given = {**dict(zip((one.name for one in schema.arguments), args, strict=False)), **kwargs}
            changed = [given.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write]
            for tensor in tree_leaves(changed):
                for name, held in self.named.pop(_memory(tensor), {}).items():
                    self.saved[name] = held.detach().clone()
        return func(*args, **kwargs)


def _memory(tensor: Any) -> int | None:
    """Whose memory a tensor has; None for what has none of its own."""
    try:
        return tensor.untyped_storage()._cdata if isinstance(tensor, torch.Tensor) else None
    except (NotImplementedError, RuntimeError):  # of a tensor that wraps others
        return None
