"""A module's forward as a graph, or the reason why it cannot be vouched for.

`torch.fx` records what a forward does to its tensors, once. That is the whole truth only if the forward is a function of its
arguments and of attributes that stay as they are. So a trace here is refused, with the reason, when the forward

- branches on a tensor, or asks what only the tensor knows (`proxies.py`);
- compares with `is`, catches or enters a context, itself or in a function that it calls (`readable.py`, `codes_run.py`);
- makes tensors of its own (`torch.rand` would be drawn once and for all; `asked.py`), or draws random numbers in Python;
- turns gradients or autocast on or off, which a graph does not record;
- changes attributes of its module or anything they hold (`state.py`), or prints.

A child that is refused becomes one opaque call in the graph of its parent. What was read but cannot be seen in the graph (mode,
hooks, children and attributes of every module traced through) is the guard of the trace: see `guard.py`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils._pytree import tree_leaves

from onelaunch.fuse.arguments import Arguments, Thing
from onelaunch.fuse.asked import Asked, NoTensorsOfItsOwn, asked_at_places
from onelaunch.fuse.codes_run import CallsSeen, Running, no_collection
from onelaunch.fuse.operations import hooked, is_known
from onelaunch.fuse.own_thread import ONE_AT_A_TIME, OwnThreadTracer
from onelaunch.fuse.proxies import TensorProxy, ThingProxy, marked
from onelaunch.fuse.readable import methods_of, why_not_readable
from onelaunch.fuse.refused import RefusedError as RefusedError
from onelaunch.fuse.refused import said_by as said_by
from onelaunch.fuse.state import CONTAINERS, generators_unmoved, same_contents, unchanged
from onelaunch.fuse.twin import sealed
from onelaunch.ops.call_context import saves_through_hooks


class StandsForClass:
    """A forward set on an instance that computes what its class's own forward computes."""


STANDS_FOR_CLASS = StandsForClass()


@dataclass
class Trace:
    graph: fx.Graph
    root: nn.Module
    inlined: dict[str, nn.Module]  # by path: the modules whose forward is now part of the graph, the root ("") first
    opaque: dict[str, str]  # path of a child that is called as a whole -> why
    asked: list[Asked] = field(default_factory=list)  # of tensors that are no proxies

    def module(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))


def trace(root: nn.Module, arguments: Arguments) -> Trace:
    """The graph of `root`'s own forward for a call of this kind, or RefusedError."""
    try:
        # With gradients, whoever asks: what a forward takes away of them is seen then, and refused.
        with torch.inference_mode(False), torch.enable_grad(), ONE_AT_A_TIME, no_collection(), generators_unmoved():
            tracer = _Tracer(arguments)
            with _unchanged(list(root.modules())), NoTensorsOfItsOwn() as asked:
                graph = tracer.trace(root)
    except RefusedError:
        raise
    except (Exception, SystemExit) as error:  # fx and the forward itself may raise anything when fed with proxies
        raise RefusedError(said_by(error)) from error
    return Trace(graph, root, tracer.inlined, tracer.opaque, asked_at_places(asked.questions.values(), root.modules()))


def why_opaque(module: nn.Module) -> str | None:
    """Why a child must stay one call: it hides what it does, or something watches it."""
    if hooked(module):
        return "has a hook"
    if not isinstance(vars(module).get("forward", STANDS_FOR_CLASS), StandsForClass):
        return "has a forward of its own"
    if sealed(module):
        return f"is {sealed(module)}"
    if type(module) in (nn.Sequential, nn.Identity):
        return None
    if type(module).__module__.startswith("torch.nn") or is_known(module):
        return "is one operation"
    return why_not_readable(module)


def _named_by_code(kind: type[nn.Module]) -> dict[str, Any]:
    """Lists and the like among globals and class attributes that the forward of a class names."""
    found = {}
    for method in methods_of(kind):
        for name in method.__code__.co_names:
            of_class = (vars(base)[name] for base in kind.__mro__ if name in vars(base))
            for value in (method.__globals__.get(name), *of_class):
                if isinstance(value, CONTAINERS):
                    found[name] = value
    return found


def _unchanged(modules: list[nn.Module]) -> AbstractContextManager[None]:
    named: dict[str, Any] = {}
    for kind in {type(module) for module in modules}:
        named |= _named_by_code(kind)
    return unchanged(modules, named)


class _Tracer(OwnThreadTracer):
    proxy_buffer_attributes = True

    def __init__(self, arguments: Arguments) -> None:
        super().__init__()
        self.arguments = arguments
        self.inputs: list[fx.Proxy] = []
        self.given: list[Any] = []  # the lists and dictionaries among the arguments
        self.inlined: dict[str, nn.Module] = {}
        self.opaque: dict[str, str] = {}
        self.owner = ""
        self.modes = _modes()
        self.running = Running(set())  # of the module whose forward runs
        self.calls = CallsSeen(lambda frame: self.running.see(frame))

    def _run(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """A module's forward, refused for anything that it runs."""
        before = self.calls.turn(True)
        try:
            result = forward(*args, **kwargs)
        finally:
            self.calls.turn(before)
        self.running.check()
        return result

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        before = self.calls.turn(False)  # fx is no part of the forward, and slower while its calls are seen
        try:
            return super().create_proxy(*args, **kwargs)
        finally:
            self.calls.turn(before)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if marked(node):
            self.running.meet_part()
        return TensorProxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        reason = why_not_readable(self.root)
        if reason:
            raise RefusedError(reason)
        self.inlined[""] = self.root
        positional = [self._argument(kind) for kind in self.arguments.positional]
        keywords = {name: self._argument(kind) for name, kind in self.arguments.keywords}
        # `inspect.unwrap` by fx would skip decorators that change what the forward does.
        forward = type(self.root).forward
        before = [container.copy() for container in self.given]

        def run(module: nn.Module) -> Any:
            result = self._run(forward, module, *positional, **keywords)
            if not all(map(same_contents, self.given, before)):
                raise RefusedError("changes a list or dictionary that it is given")
            if any(isinstance(value, np.generic) for value in tree_leaves(result)):
                raise RefusedError("returns a number of numpy's")
            return result

        return run, [self.root]

    def _argument(self, kind: Any) -> Any:
        """What the forward is given for an argument of this kind."""
        if isinstance(kind, (int, Thing)):
            index = kind if isinstance(kind, int) else kind.index
            if index == len(self.inputs):
                proxy = self.create_proxy("placeholder", f"input_{index + 1}", (), {})
                self.inputs.append(proxy if isinstance(kind, int) else ThingProxy(proxy.node, self))
            return self.inputs[index]
        if kind[0] is tuple:
            return tuple(map(self._argument, kind[1]))
        if kind[0] in (list, dict):
            items = list(map(self._argument, kind[-1]))
            self.given.append(items if kind[0] is list else dict(zip(kind[1], items, strict=True)))
            return self.given[-1]
        return kind[1]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return super().getattr(attr, attr_val, {})  # a cached node may be one that `_forget_after` erased

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise RefusedError("enters no_grad, autocast or a checkpoint")
        if kind in ("call_module", "get_attr") and (repr(target)[1:-1] != target or '"' in target):
            raise RefusedError(f"{target!r} is no name that code can have")
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["owner"] = self.owner
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not isinstance(a, fx.Proxy) and not self._is_held(a):
            raise RefusedError("uses a tensor that is neither a parameter nor a buffer")
        plain = (dict, list, tuple, torch.Size, immutable_dict, immutable_list)
        if isinstance(a, (dict, list, tuple)) and type(a) not in plain and not hasattr(a, "_fields"):
            raise RefusedError(f"passes on a {type(a).__name__}")
        if hasattr(type(a), "__dataclass_fields__") and not _made_by_fields(a):
            raise RefusedError(f"makes a {type(a).__name__}, which is more than its fields")
        if isinstance(a, np.generic) and isinstance(a, (float, str)):
            a = a.item()  # the same value; generated code does not know numpy
        return super().create_arg(a)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return any(tensor is held for held in (*self.root.parameters(), *self.root.buffers()))

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.elsewhere:
            return forward(*args, **kwargs)
        before = self.calls.turn(False)
        try:
            return self._called(m, forward, args, kwargs)
        finally:
            self.calls.turn(before)

    def _called(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A child as a part of the graph: what its forward does, or one call."""
        try:
            path = self.path_of_module(m)
        except NameError:
            if any(True for _ in m.parameters()) or any(True for _ in m.buffers()):
                raise RefusedError("calls a module that is not registered") from None
            # Made on the way, such as a loss: its forward is as good as a function.
            return self._run(forward, *args, **kwargs)
        if type(m).__call__ is not nn.Module.__call__ and not sealed(m):
            raise RefusedError(f"{path} has a __call__ of its own")
        reason = why_opaque(m)
        if reason is None:
            last = next(iter(reversed(self.graph.nodes)))
            known = dict(self.inlined)
            owner, self.owner = self.owner, path
            outer, self.running = self.running, Running(self.running.holders)
            try:
                self.inlined[path] = m
                with _unchanged([m]):
                    return self._run(type(m).forward, m, *args, **kwargs)
            except (Exception, SystemExit) as error:
                reason = said_by(error)
                self.inlined = known
                self._forget_after(last)
            finally:
                self.owner, self.running = owner, outer
        self._check_lists((*args, *kwargs.values()))
        self.opaque[path] = reason
        proxy = self.create_proxy("call_module", path, args, kwargs)
        if not is_known(m):
            proxy.node.meta["part"] = False  # all it returns, of which a part may be None
        return proxy

    def _check_lists(self, value: Any) -> None:
        """A module called as a whole gets copies of lists: one that is to be filled would stay empty."""
        if isinstance(value, (list, dict)) and (not value or any(value is given for given in self.given)):
            raise RefusedError("passes on a list or dictionary that a child may change")
        if isinstance(value, (list, tuple, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                self._check_lists(item)

    def _forget_after(self, last: fx.Node) -> None:
        for node in reversed(self.graph.nodes):
            if node is last:
                break
            self.graph.erase_node(node)


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")),
        saves_through_hooks(),
    )


def _made_by_fields(value: Any) -> bool:
    """Whether the constructor of a dataclass makes the value again from its fields: that is what a graph calls."""
    kind = type(value)
    plain = (
        "__dataclass_fields__" in vars(kind) and kind.__dataclass_params__.init and not hasattr(kind, "__post_init__")
    )
    names = {one.name for one in fields(value) if one.init}
    return plain and len(names) == len(fields(value)) and set(getattr(value, "__dict__", ())) <= names
