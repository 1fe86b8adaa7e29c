"""What stands for a tensor during a trace, and refuses the questions that only a tensor can answer."""

from __future__ import annotations

import operator
import sys
import types
from typing import Any

import torch
from torch import fx

from onelaunch.fuse.refused import RefusedError

# May be None, or another object, for some tensors: `x.grad_fn is None` would be answered for the proxy.
_OPEN = frozenset({"grad", "grad_fn", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"})
_TYPE_NAMES = frozenset({"isinstance", "__class__"})
_OF_FX = frozenset({"node", "_node", "tracer", "root", "attr"})


class TensorProxy(fx.Proxy):
    """Keeps `h += x` a change in place: plain fx makes it `h = h + x`, which another name of h does not see."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` asks for; torch's functions in C ask too, and seem to be the code that calls them."""
        frame = _asking()
        if not _is_torch(frame) and not _TYPE_NAMES.isdisjoint(frame.f_code.co_names):
            raise RefusedError("asks for the type of a value")
        return type(self)

    def __getattr__(self, name: str) -> Any:
        frame = _asking()
        attribute = _AttributeProxy(self, name)
        if not _is_torch(frame):
            given = type(self) is TensorProxy and self.node.op == "placeholder"
            of_tensors = hasattr(torch.Tensor, name)
            if name in _OPEN or (given and not of_tensors):
                raise RefusedError(f"asks a tensor for its {name}")
            # By `hasattr`, or `getattr` with a default: a proxy has everything.
            if name not in frame.f_code.co_names and not (of_tensors and not from_child(self)):
                raise RefusedError(f"asks whether a value has an attribute ({name})")
            if is_part(attribute):
                self.tracer.running.meet_part()  # type: ignore[attr-defined]
        return attribute

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_FX:
            raise RefusedError(f"sets an attribute of a tensor ({name})")
        super().__setattr__(name, value)


class _AttributeProxy(TensorProxy, fx.proxy.Attribute):
    pass


class ThingProxy(TensorProxy):
    """Stands for an argument that is no tensor. What it holds may be None, or anything: it is passed on, not looked into."""

    def __getattr__(self, name: str) -> Any:
        raise RefusedError("looks into an argument that is neither a tensor, a list nor a dictionary")

    def __getitem__(self, item: Any) -> Any:
        raise RefusedError("looks into an argument that is neither a tensor, a list nor a dictionary")


def marked(node: fx.Node) -> bool:
    """Marks a node that is a part of what a child returns that is called as a whole, and says whether it is one."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or "part" not in source.meta:
        return False
    looked_up = node.target is getattr and not hasattr(torch.Tensor, str(node.args[1]))
    method = node.op == "call_method" and not hasattr(torch.Tensor, str(node.target))  # a dictionary's `get`
    if node.target is operator.getitem or looked_up or method:
        node.meta["part"] = True
    return "part" in node.meta


def is_part(value: Any) -> bool:
    """Whether a value is such a part, which may be None, as its proxy is not."""
    if type(value) is _AttributeProxy:
        return not hasattr(torch.Tensor, value.attr) and from_child(value.root)
    return type(value) is TensorProxy and bool(value.node.meta.get("part"))


def from_child(value: Any) -> bool:
    """Whether a value is such a part, or all that the child returns."""
    return is_part(value) or (type(value) is TensorProxy and "part" in value.node.meta)


def _asking() -> types.FrameType:
    """The code that asks a proxy something."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__instancecheck__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _is_torch(frame: types.FrameType) -> bool:
    """Torch's code, and ours, knows that it has a proxy."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "onelaunch")


def _in_place(name: str) -> Any:
    function = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "imatmul", "iand", "ior", "ixor", "ifloordiv", "imod"):
    setattr(TensorProxy, f"__{_name}__", _in_place(_name))
