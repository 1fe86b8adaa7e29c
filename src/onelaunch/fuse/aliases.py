"""Which values of a graph share memory, and which are changed in place."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx, nn

from onelaunch.fuse.operations import of_call
from onelaunch.fuse.tracing import Trace

# Functions and methods whose result never shares memory with an argument.
_FRESH_NAMES = frozenset(
    (
        "add", "sub", "mul", "div", "truediv", "matmul", "mm", "bmm", "addmm", "linear", "relu", "leaky_relu", "gelu", "silu",
        "sigmoid", "tanh", "softmax", "log_softmax", "layer_norm", "batch_norm", "group_norm", "conv1d", "conv2d", "conv3d",
        "cat", "stack", "sum", "mean", "exp", "log", "sqrt", "pow", "neg", "einsum", "embedding", "interpolate", "max_pool2d",
        "adaptive_avg_pool2d", "scaled_dot_product_attention", "cross_entropy", "nll_loss",
    )
)  # fmt: skip
_FRESH_MODULES = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.LayerNorm, nn.GroupNorm, nn.Embedding, nn.EmbeddingBag, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.LogSoftmax,
    nn.MaxPool2d, nn.AvgPool2d, nn.NLLLoss, nn.CrossEntropyLoss,
)  # fmt: skip
_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ipow",
        "imatmul",
        "iand",
        "ior",
        "ixor",
        "ifloordiv",
        "imod",
        "setitem",
    )
)


def label(node: fx.Node) -> str:
    """A node's name for people: the module's path, or the function and the module that calls it."""
    if node.op == "call_module":
        return str(node.target)
    owner = node.meta.get("owner", "")
    name = getattr(node.target, "__name__", str(node.target))
    return f"{owner}.{name}" if owner else name


class Changes:
    """Which values of a graph are changed in place, through any view of them, and by which node."""

    def __init__(self, trace: Trace) -> None:
        self.order = {node: index for index, node in enumerate(trace.graph.nodes)}
        self.same: dict[fx.Node, fx.Node] = {node: node for node in trace.graph.nodes}
        self.changed: list[tuple[fx.Node, fx.Node]] = []  # (value, the node that changes it)
        for node in trace.graph.nodes:
            inputs = node.all_input_nodes
            in_place = _in_place_target(node, trace)
            if in_place is not None:
                self.changed.append((in_place, node))
                inputs = [in_place]  # the result is that value, and no view of the others
            if not _is_fresh(node, trace) and node.op not in ("placeholder", "get_attr", "output"):
                for one in inputs:
                    self.same[self._root(one)] = self._root(node)

    def _root(self, node: fx.Node) -> fx.Node:
        while self.same[node] is not node:
            node = self.same[node]
        return node

    def after(self, nodes: list[fx.Node], read: fx.Node) -> str | None:
        """Why a change in place, later than these nodes, of their result or of what they read forbids making them one."""
        ends = {self._root(nodes[-1]): "result", self._root(read): "input"}
        for value, changer in self.changed:
            if changer not in nodes and self.order[changer] > self.order[nodes[0]]:
                end = ends.get(self._root(value))
                if end is not None:
                    return f"its {end} is changed in place by {label(changer)}"
        return None


def _in_place_target(node: fx.Node, trace: Trace) -> Any:
    """The value that a node writes over, or None."""
    first = next(iter(node.args), node.kwargs.get("input"))
    out = node.kwargs.get("out")
    if isinstance(out, fx.Node):
        return out
    if not isinstance(first, fx.Node):
        return None
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_module":
        return first if getattr(trace.module(node), "inplace", False) else None
    if node.op in ("call_function", "call_method"):
        by_name = name.endswith("_") and not name.endswith("__")
        operation = of_call(node.target, node.args, node.kwargs)
        by_option = node.kwargs.get("inplace") is True or (operation is not None and operation.inplace)
        if by_name or by_option or node.target in _IN_PLACE_OPERATORS or name == "__setitem__":
            return first
    return None


def _is_fresh(node: fx.Node, trace: Trace) -> bool:
    if _in_place_target(node, trace) is not None:
        return False
    if node.op == "call_module":
        module = trace.module(node)
        return type(module) in _FRESH_MODULES or type(module) in (nn.ReLU, nn.SiLU, nn.LeakyReLU)
    if node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        return name in _FRESH_NAMES
    return False
