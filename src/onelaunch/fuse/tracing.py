"""A module's forward as a graph, or the reason why it cannot be vouched for.

`torch.fx` records what a forward does to its tensors, once. That is the whole truth only if the forward is a function of its
arguments and of attributes that stay as they are. So a trace here is refused, with the reason, when the forward

- branches on a tensor, or asks for the type of an argument (which is a proxy during the trace);
- makes tensors of its own (`torch.rand` would be drawn once and for all), or draws random numbers in Python;
- enters `no_grad` or `autocast`, which a graph does not record;
- changes attributes of its module, or prints.

A child that is refused becomes one opaque call in the graph of its parent. What was read but cannot be seen in the graph (mode,
hooks, children and attributes of every module traced through) is the guard of the trace: see `guard.py`.
"""

from __future__ import annotations

import inspect
import operator
import random
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from onelaunch.fuse.arguments import Arguments, Thing
from onelaunch.fuse.operations import hooked, is_known
from onelaunch.fuse.own_thread import ONE_AT_A_TIME, OwnThreadTracer
from onelaunch.fuse.twin import sealed
from onelaunch.rng import numpy_words

# Names in a forward's code that make it more than a function of its tensors, or that a proxy answers wrongly.
TELLING_NAMES = frozenset(
    {
        *("isinstance", "issubclass", "type", "is_tensor", "hasattr", "print", "warn"),
        # A graph records none of these, and some change nothing while it is recorded.
        *("no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "checkpoint", "save_on_cpu"),
    }
)
# Questions about a real tensor (a parameter's) that make no new one; a change of mode is seen at the next node.
HARMLESS = frozenset(
    {
        "_set_grad_enabled",
        "__get__",
        "dim",
        "size",
        "numel",
        "stride",
        "element_size",
        "is_floating_point",
        "is_contiguous",
    }
)


class RefusedError(Exception):
    """Why a forward cannot be taken as a graph."""


class StandsForClass:
    """A forward set on an instance that computes what its class's own forward computes."""


STANDS_FOR_CLASS = StandsForClass()


@dataclass
class Trace:
    graph: fx.Graph
    root: nn.Module
    inlined: dict[str, nn.Module]  # by path: the modules whose forward is now part of the graph, the root ("") first
    opaque: dict[str, str]  # path of a child that is called as a whole -> why

    def module(self, node: fx.Node) -> nn.Module:
        return self.root.get_submodule(str(node.target))


def trace(root: nn.Module, arguments: Arguments) -> Trace:
    """The graph of `root`'s own forward for a call of this kind, or RefusedError."""
    tracer = _Tracer(arguments)
    try:
        with ONE_AT_A_TIME, _unchanged(list(root.modules())), _NoTensorsOfItsOwn():
            graph = tracer.trace(root)
    except RefusedError:
        raise
    except (Exception, SystemExit) as error:  # fx and the forward itself may raise anything when fed with proxies
        raise RefusedError(said_by(error)) from error
    return Trace(graph, root, tracer.inlined, tracer.opaque)


def said_by(error: BaseException, *, sentence: bool = True) -> str:
    """The first line of an error, or sentence of it, with its kind where that alone says little."""
    first = next(iter(str(error).strip().splitlines()), "")
    if sentence:
        first = first.split(". ")[0].rstrip(".")
    return first if " " in first else f"{type(error).__name__} {first}".rstrip()


class _NoTensorsOfItsOwn(TorchFunctionMode):
    """Refuses torch calls without a proxy: their result would be frozen into the graph."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if any(issubclass(kind, fx.Proxy) for kind in kinds) or name in HARMLESS:
            return func(*args, **(kwargs or {}))
        raise RefusedError(f"makes a tensor of its own ({name})")


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
    return why_not_readable(type(module))


def why_not_readable(kind: type[nn.Module]) -> str | None:
    """Why a trace of this class's forward, and of the methods it calls, would not be the whole truth."""
    seen: set[str] = set()
    left = ["forward"]
    while left:
        name = left.pop()
        method = getattr(kind, name, None)
        if name in seen or not isinstance(method, types.FunctionType) or _of_torch(method):
            continue
        seen.add(name)
        names = {*_names(method.__code__), *_names(getattr(inspect.unwrap(method), "__code__", None))}
        telling = sorted(names & TELLING_NAMES)
        if telling:
            return f"its forward calls {telling[0]}"
        left += sorted(names)
    return None


def _of_torch(method: types.FunctionType) -> bool:
    return (method.__module__ or "").startswith("torch.")  # generated code has no module


def _names(code: Any) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _names(constant)


@contextmanager
def _unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Puts back what the block changes of the modules' attributes (lists, dicts and sets in them too), and refuses then.

    The dictionaries of buffers and parameters among them are those of the original model.
    """
    before = [(vars(module), dict(vars(module))) for module in modules]
    contents = [
        (name, value, value.copy())
        for _, attributes in before
        for name, value in attributes.items()
        if isinstance(value, (list, dict, set))
    ]
    random_state, numpy_state, words = random.getstate(), np.random.get_state(), numpy_words()  # noqa: NPY002
    changed: list[str] = []
    try:
        yield
    finally:
        for name, value, old in contents:
            if not same_contents(value, old):
                changed.append(name)
                value.clear()
                value.extend(old) if isinstance(value, list) else value.update(old)
        for now, old in before:
            if not same_contents(now, old):
                changed += [name for name in now.keys() | old.keys() if now.get(name, old) is not old.get(name, old)]
                now.clear()
                now.update(old)
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


def same_contents(now: Any, old: Any) -> bool:
    if len(now) != len(old) or isinstance(now, set):
        return bool(now == old)
    if isinstance(now, list):
        return not any(map(operator.is_not, now, old))
    return all(map(operator.is_, now.values(), old.values())) and list(now) == list(old)


class _Proxy(fx.Proxy):
    """Keeps `h += x` a change in place. Plain fx makes it `h = h + x`, which another name of h does not see."""


def _in_place(name: str) -> Any:
    function = getattr(operator, name)
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "imatmul", "iand", "ior", "ixor", "ifloordiv", "imod"):
    setattr(_Proxy, f"__{_name}__", _in_place(_name))


class _ThingProxy(_Proxy):
    """Stands for an argument that is no tensor. What it holds may be None, or anything: it is passed on, not looked into."""

    def __getattr__(self, name: str) -> Any:
        raise RefusedError("looks into an argument that is neither a tensor, a list nor a dictionary")

    def __getitem__(self, item: Any) -> Any:
        raise RefusedError("looks into an argument that is neither a tensor, a list nor a dictionary")


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

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        reason = why_not_readable(type(self.root))
        if reason:
            raise RefusedError(reason)
        self.inlined[""] = self.root
        positional = [self._argument(kind) for kind in self.arguments.positional]
        keywords = {name: self._argument(kind) for name, kind in self.arguments.keywords}
        # `inspect.unwrap` by fx would skip decorators that change what the forward does.
        forward = type(self.root).forward
        before = [container.copy() for container in self.given]

        def run(module: nn.Module) -> Any:
            result = forward(module, *positional, **keywords)
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
                self.inputs.append(proxy if isinstance(kind, int) else _ThingProxy(proxy.node, self))
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

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if _modes() != self.modes:
            raise RefusedError("enters no_grad, autocast or a checkpoint")
        node = super().create_node(*args, **kwargs)
        node.meta["owner"] = self.owner
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not isinstance(a, fx.Proxy) and not self._is_held(a):
            raise RefusedError("uses a tensor that is neither a parameter nor a buffer")
        if isinstance(a, dict) and type(a) is not dict:
            raise RefusedError(f"passes on a {type(a).__name__}")
        if isinstance(a, np.generic) and isinstance(a, (float, str)):
            a = a.item()  # the same value; generated code does not know numpy
        return super().create_arg(a)

    def _is_held(self, tensor: torch.Tensor) -> bool:
        return any(tensor is held for held in (*self.root.parameters(), *self.root.buffers()))

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.elsewhere:
            return forward(*args, **kwargs)
        try:
            path = self.path_of_module(m)
        except NameError:
            if any(True for _ in m.parameters()) or any(True for _ in m.buffers()):
                raise RefusedError("calls a module that is not registered") from None
            return forward(*args, **kwargs)  # made on the way, such as a loss: its forward is as good as a function
        if type(m).__call__ is not nn.Module.__call__ and not sealed(m):
            raise RefusedError(f"{path} has a __call__ of its own")
        reason = why_opaque(m)
        if reason is None:
            last = next(iter(reversed(self.graph.nodes)))
            known = dict(self.inlined)
            owner, self.owner = self.owner, path
            try:
                self.inlined[path] = m
                with _unchanged([m]):
                    return type(m).forward(m, *args, **kwargs)
            except (Exception, SystemExit) as error:
                reason = said_by(error)
                self.inlined = known
                self._forget_after(last)
            finally:
                self.owner = owner
        self._check_lists((*args, *kwargs.values()))
        self.opaque[path] = reason
        return self.create_proxy("call_module", path, args, kwargs)

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
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,  # set by checkpointing and save_on_cpu
    )
