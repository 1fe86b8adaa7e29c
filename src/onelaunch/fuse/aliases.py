"""Which values of a graph share memory, and which are changed in place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from onelaunch.fuse.operations import hooked, of_call
from onelaunch.fuse.tracing import Trace

# Functions and methods whose result never shares memory with an argument.
_FRESH_NAMES = frozenset(
    (
        "add", "sub", "mul", "div", "truediv", "matmul", "mm", "bmm", "addmm", "linear", "relu", "leaky_relu", "gelu", "silu",
        "sigmoid", "tanh", "softmax", "log_softmax", "layer_norm", "batch_norm", "group_norm", "conv1d", "conv2d", "conv3d",
        "cat", "stack", "sum", "mean", "exp", "log", "sqrt", "pow", "neg", "embedding", "interpolate", "max_pool2d",
        "adaptive_avg_pool2d", "scaled_dot_product_attention", "cross_entropy", "nll_loss", "where", "masked_fill",
        "addcmul", "baddbmm", "clamp", "clone", "argmax", "gather", "index_select", "abs", "rsqrt", "sin", "cos",
    )
)  # fmt: skip
_FRESH_MODULES = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.LayerNorm, nn.GroupNorm, nn.Embedding, nn.EmbeddingBag, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax,
    nn.MaxPool2d, nn.AvgPool2d, nn.NLLLoss, nn.CrossEntropyLoss,
)  # fmt: skip
_IN_PLACE_NAMES = (
    "iadd", "isub", "imul", "itruediv", "ipow", "imatmul", "iand", "ior", "ixor", "ifloordiv", "imod", "ilshift", "irshift",
    "setitem",
)  # fmt: skip
_IN_PLACE_OPERATORS = frozenset(
    (*(getattr(operator, name) for name in _IN_PLACE_NAMES), *(f"__{name}__" for name in _IN_PLACE_NAMES))
)


def label(node: fx.Node) -> str:
    """A node's name for people: the module's path, or the function and the module that calls it."""
    if node.op == "call_module":
        return str(node.target)
    owner = node.meta.get("owner", "")
    name = getattr(node.target, "__name__", str(node.target))
    return f"{owner}.{name}" if owner else name


class Changes:
    """Which values of a graph are changed in place, through any view of them, and by which node.

    A value is a node, or the memory of a parameter or buffer, which several nodes and modules may read by different names.
    """

    def __init__(self, trace: Trace) -> None:
        self.order = {node: index for index, node in enumerate(trace.graph.nodes)}
        self.same: dict[Any, Any] = {}
        self.changed: list[tuple[Any, fx.Node]] = []  # (value, the node that changes it)
        self.perhaps: list[tuple[Any, fx.Node]] = []  # the same for calls that nothing is known of
        self.modes: list[fx.Node] = []  # where no_grad, autocast and their like begin and end
        for node in trace.graph.nodes:
            inputs: list[Any] = node.all_input_nodes
            written = _written(node, trace)
            states = [state for state in _written_state(node, trace) if state is not None]
            self.changed += [(value, node) for value in (*written, *states)]
            if _is_unknown(node, trace):
                self.perhaps += [(value, node) for value in inputs]
            if _is_mode(node, self.modes):
                self.modes.append(node)
            if node.op == "get_attr":
                inputs = _memory([_attribute(trace.root, str(node.target))])
            elif written and node.op != "call_module":
                inputs = written  # the result is that value, and no view of the others
            if not _is_fresh(node, trace) and node.op not in ("placeholder", "output"):
                for one in inputs:
                    self.same[self._root(one)] = self._root(node)
        # A caller may pass two views of one tensor.
        self.passed = {self._root(node) for node in trace.graph.nodes if node.op == "placeholder"}

    def _root(self, value: Any) -> Any:
        while (other := self.same.get(value, value)) is not value:
            value = other
        return value

    def after(self, nodes: list[fx.Node], read: fx.Node) -> str | None:
        """Why a change in place, later than these nodes, of their result or of what they read forbids making them one."""
        ends = {self._root(nodes[-1]): "result", self._root(read): "input"}
        for value, changer in self.changed:
            if changer not in nodes and self.order[changer] > self.order[nodes[0]]:
                end = ends.get(self._root(value))
                if end is not None:
                    return f"its {end} is changed in place by {label(changer)}"
        return None

    def moved(self, nodes: list[fx.Node], reads: Iterable[tuple[fx.Node, list[Any]]], place: fx.Node) -> str | None:
        """Why operations, each with the values it reads, cannot all be done at `place`, the first or the last of `nodes`."""
        first, last = self.order[nodes[0]], self.order[nodes[-1]]
        if any(first < self.order[mode] < last for mode in self.modes):
            return "no_grad, autocast or the like begins or ends inside it"
        for reader, values in reads:
            start, end = sorted((self.order[reader], self.order[place]))
            known = {self._shared_root(value) for value in values}
            for value, changer in (*self.changed, *self.perhaps):
                if start < self.order[changer] < end and changer not in nodes and self._shared_root(value) in known:
                    return f"what {label(reader)} reads may be changed in place by {label(changer)}"
        return None

    def _shared_root(self, value: Any) -> Any:
        root = self._root(value)
        return "an argument" if root in self.passed else root


def state_of(module: nn.Module | None) -> list[Any]:
    """The parameters and buffers of a module itself, as values."""
    return [] if module is None else _memory([*module._parameters.values(), *module._buffers.values()])


def _memory(tensors: Iterable[Any]) -> list[Any]:
    """What tells the memory of tensors apart."""
    found: list[Any] = []
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            try:
                found.append(("memory", tensor.untyped_storage()._cdata))
            except Exception:  # a lazy parameter, or a subclass without storage: nothing else shares it
                found.append(("tensor", id(tensor)))
    return found


def _attribute(root: nn.Module, path: str) -> Any:
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def _written(node: fx.Node, trace: Trace) -> list[fx.Node]:
    """The values that a node writes over, as far as its name, options or schema tell."""
    return [value for value in _written_arguments(node, trace) if isinstance(value, fx.Node)]


def _written_arguments(node: fx.Node, trace: Trace) -> Iterable[Any]:
    first = next(iter((*node.args, *node.kwargs.values())), None)
    firsts = list(first) if isinstance(first, (list, tuple)) else [first]  # torch._foreach_add_ takes a list
    out = node.kwargs.get("out")
    if out is not None:
        return out if isinstance(out, (list, tuple)) else [out]
    if node.op == "call_module":
        module = trace.module(node)
        if getattr(module, "inplace", False):
            return firsts
        # One that is called as a whole, and has such an operation inside, may begin with it.
        inside = any(getattr(child, "inplace", False) for child in module.modules())
        return node.all_input_nodes if inside else []
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        return _written_by_schema(node.target, node.args, node.kwargs)
    name = _name(node)
    operation = of_call(node.target, node.args, node.kwargs)
    if (
        (name.endswith("_") and not name.endswith("__"))
        or not _IN_PLACE_OPERATORS.isdisjoint((node.target, name))
        or (operation is not None and operation.inplace)
        or _option(node, "inplace") is True
    ):
        return firsts
    return []


def _written_by_schema(target: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[Any]:
    kinds = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in target.overloads()]
    for kind in kinds:
        for index, parameter in enumerate(kind._schema.arguments):
            if parameter.alias_info is not None and parameter.alias_info.is_write:
                value = arguments[index] if index < len(arguments) else keywords.get(parameter.name)
                yield from value if isinstance(value, (list, tuple)) else (value,)


def _written_state(node: fx.Node, trace: Trace) -> list[Any]:
    """Running statistics that a norm moves, and rows that an embedding scales down: written, but not what it returns."""
    if node.op == "call_module":
        module = trace.module(node)
        moves = module.training and getattr(module, "running_mean", None) is not None
        scales = getattr(module, "max_norm", None) is not None
        return _memory([*(module._buffers if moves else {}).values(), *(module._parameters if scales else {}).values()])
    if node.op == "call_function" and _name(node) in ("batch_norm", "instance_norm"):
        if not _places(node.target):  # torch.batch_norm, with another order than F.batch_norm
            return node.all_input_nodes[1:]
        return [_option(node, name) for name in ("running_mean", "running_var")]
    return [_option(node, "weight")] if _option(node, "max_norm") is not None else []


def _option(node: fx.Node, name: str) -> Any:
    """An argument of a function of torch, passed by its name or by its place."""
    if name in node.kwargs or node.op != "call_function":
        return node.kwargs.get(name)
    place = _places(node.target).get(name, len(node.args))
    return node.args[place] if place < len(node.args) else None


@lru_cache(maxsize=1024)
def _places(function: Any) -> dict[str, int]:
    try:
        return {name: place for place, name in enumerate(inspect.signature(function).parameters)}
    except (TypeError, ValueError):  # written in C++: none of those has such options
        return {}


def _is_unknown(node: fx.Node, trace: Trace) -> bool:
    """A call of other people's code, which may write over whatever it is given."""
    if node.op == "call_module":
        module = trace.module(node)
        of_torch = type(module).__module__.startswith("torch.nn") and not module._modules
        return not of_torch or _does_more(module)
    if node.op != "call_function":
        return False
    home = getattr(node.target, "__module__", None) or "torch"
    return isinstance(node.target, HigherOrderOperator) or home.split(".")[0] not in _LIBRARIES


def _does_more(module: nn.Module) -> bool:
    """Whether a call is not only what the class says: a hook may change or exchange what comes and goes."""
    return hooked(module) or "forward" in vars(module)


_LIBRARIES = ("torch", "_operator", "operator", "builtins", "math")


def _is_mode(node: fx.Node, modes: list[fx.Node]) -> bool:
    """`torch._C._set_grad_enabled`, `_enter_autocast` and the like, as dynamo writes them: private, and not fed by tensors."""
    return node.op == "call_function" and _name(node).startswith("_") and all(i in modes for i in node.all_input_nodes)


def _is_fresh(node: fx.Node, trace: Trace) -> bool:
    if _written(node, trace):
        return False
    if node.op == "call_module":
        module = trace.module(node)
        known = type(module) in _FRESH_MODULES or type(module) in (nn.ReLU, nn.SiLU, nn.LeakyReLU)
        return known and not _does_more(module)
    if node.op in ("call_function", "call_method"):
        if _name(node) == "einsum":  # of one tensor it may be a view
            return len(node.all_input_nodes) > 1
        return _name(node) in _FRESH_NAMES
    return False
