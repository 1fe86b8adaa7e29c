"""In which memory the values of a captured graph lie, and which of it an operation changes in place."""

from __future__ import annotations

import functools
import inspect
import operator
import re
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onelaunch.fuse.graph import name_of, tensors_of

INPLACE_OPERATORS = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul, operator.setitem,
)  # fmt: skip
_INPLACE_OPERATOR_METHODS = {f"__{function.__name__}__" for function in INPLACE_OPERATORS}
_PRIVATE_INPLACE = re.compile("^_.*[^_]_$")  # such as torch._foreach_lerp_ and _fused_adam_, which change several lists
_MODULES = ("torch", "_operator", "math", "builtins")  # whose functions say by name or argument what they change
CHANGES_NOTHING = "onelaunch_changes_nothing"  # a key of a node's metadata
_STATISTICS = ("running_mean", "running_var")
# function -> (the argument that makes it change others, that argument's default, the arguments that it changes)
_WRITERS: dict[Any, tuple[str, Any, tuple[str, ...]]] = {
    F.batch_norm: ("training", False, _STATISTICS),
    F.instance_norm: ("use_input_stats", True, _STATISTICS),
    F.embedding: ("max_norm", None, ("weight",)),
    F.embedding_bag: ("max_norm", None, ("weight",)),
}
_NATIVE_NORMS = (torch.batch_norm, torch.instance_norm, torch.native_batch_norm)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that one inside `torch.vmap` or `torch.func.grad` stands for; all values of a nested tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    inner: torch.Tensor | None = getattr(tensor, "_values", None) if tensor.is_nested else None
    return inner if isinstance(inner, torch.Tensor) else tensor


def storages_of(*nodes: Any) -> set[int]:
    """The memory of the tensors that these nodes are or return, as numbers: views of one tensor have the same."""
    return memory_of(tensors_of(*nodes))


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {in_memory(tensor).untyped_storage()._cdata for tensor in tensors}


@functools.cache
def _position_of_inplace(function: Any) -> int:
    """Where the argument `inplace` stands in a call, as `nn.ReLU6` gives it; beyond all arguments where there is none."""
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # the name of a method, or a function in C
        names = []
    return names.index("inplace") if "inplace" in names else sys.maxsize


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes in place; all of an operation that PyTorch does not describe."""
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return _written_by_schema(node)
    name = name_of(node)
    if not is_of_torch(node) or _PRIVATE_INPLACE.search(name) or node.target in _NATIVE_NORMS:
        return node.all_input_nodes
    position = _position_of_inplace(node.target)
    inplace = node.kwargs.get("inplace") or node.args[position : position + 1] == (True,)
    # Also functions such as torch.relu_; the underscore of operator.and_ only keeps it from being a keyword.
    is_method = bool(re.search("[^_]_$", name)) and node.target not in (operator.and_, operator.or_)
    is_operator = node.target in INPLACE_OPERATORS or name in _INPLACE_OPERATOR_METHODS
    first = node.args[0] if node.args else node.kwargs.get("input")
    written: list[Any] = [first] if inplace or is_method or is_operator else []
    if node.target in _WRITERS:
        condition, default, names = _WRITERS[node.target]
        given = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
        written += [given.get(one) for one in names] if given.get(condition, default) not in (None, False) else []
    return _nodes_in(written, node.kwargs.get("out"))


def memory_written_by(node: fx.Node) -> set[int]:
    """The memory that an operation changes in place, as numbers. Every match asks this of many nodes; most change nothing."""
    if node.meta.get(CHANGES_NOTHING):
        return set()
    written = written_by(node)
    node.meta[CHANGES_NOTHING] = not written
    return storages_of(*written)


def is_written_after(node: fx.Node, memory: set[int]) -> bool:
    """Whether an operation after `node` changes this memory in place."""
    while node.op != "output":
        node = node.next
        if memory_written_by(node) & memory:
            return True
    return False


def changed_and_used(graph: fx.Graph) -> list[fx.Node]:
    """Inputs of a graph that it changes in place before a differentiable operation takes them.

    AOTAutograd may save the input and compute its change again in the backward pass, when it has changed already.
    """
    changed: dict[int, fx.Node] = {}
    inputs = {next(iter(storages_of(node)), 0): node for node in graph.find_nodes(op="placeholder")}
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if any(result.requires_grad for result in tensors_of(node)):
            found |= {one: changed[one] for one in storages_of(*node.all_input_nodes) & changed.keys()}
        changed |= {one: inputs[one] for one in memory_written_by(node) & inputs.keys()}
    return [*found.values()]


def memory_leaves(graph: fx.Graph, memory: set[int]) -> bool:
    """Whether a result of the graph is in this memory."""
    return bool(storages_of(*graph.output_node().all_input_nodes) & memory)


def is_of_torch(node: fx.Node) -> bool:
    """Whether a call is of a tensor's method, an operator, or a function or ATen operator of PyTorch; not higher-order."""
    if node.op == "call_method":
        return True
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(node.target).startswith("aten.")
    module = getattr(node.target, "__module__", None) or getattr(node.target, "__objclass__", torch.Tensor).__module__
    return module.split(".")[0] in _MODULES and not isinstance(node.target, torch._ops.HigherOrderOperator)


def _written_by_schema(node: fx.Node) -> list[fx.Node]:
    packet: Any = node.target
    one = isinstance(packet, torch._ops.OpOverload)
    overloads = [packet] if one else [getattr(packet, name) for name in packet.overloads()]
    written = []
    for schema in (overload._schema for overload in overloads):
        given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
        changed = (argument.name for argument in schema.arguments if argument.is_write)
        written += [given.get(name) for name in changed]
    return _nodes_in(written)


def _nodes_in(*values: Any) -> list[fx.Node]:
    """The nodes among these values, and in lists of them."""
    found: dict[fx.Node, None] = {}
    fx.node.map_arg(values, lambda node: found.setdefault(node))
    return [*found]
