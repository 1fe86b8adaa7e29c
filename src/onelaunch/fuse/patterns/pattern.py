"""What a pattern is: it finds a chain of operations in a captured graph and replaces it by one of our ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from onelaunch.fuse.graph import Operation, next_operation, tensor_of
from onelaunch.fuse.handwritten import handwritten_activation
from onelaunch.fuse.roofline import Cost

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Match:
    """Operations that one call of ours replaces. `nodes` follow each other, and only the last one's value is used outside."""

    pattern: Pattern
    nodes: tuple[fx.Node, ...]
    arguments: dict[str, Any] = field(hash=False)

    @property
    def title(self) -> str:
        """`linear + gelu + dropout`"""
        return " + ".join(self.arguments["parts"])


class Pattern(Protocol):
    name: str  # a word for users and for caches

    def match(self, node: fx.Node) -> Match | None:
        """The chain that starts at `node`, or None."""

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        """Insert the call of our op at the graph's insertion point, and return it."""

    def cost(self, match: Match) -> Cost:
        """Bytes, floating-point operations and launches of the replacement, forward and (if differentiated) backward."""

    def pays(self, match: Match) -> bool:
        """Whether the replacement may be faster on a CUDA device: by dtype, size and mode. Measurements decide the rest."""


def epilogue(start: fx.Node) -> tuple[list[fx.Node], str | None, float]:
    """The activation and the dropout that follow `start`: their nodes, the activation's name, the probability."""
    nodes: list[fx.Node] = []
    activation, p = None, 0.0
    following: Operation | None = next_operation(start)
    if following is not None and following.activation is not None:
        activation = following.activation
        nodes.append(following.node)
    elif (written := handwritten_activation(start)) is not None:
        activation, nodes = written
    following = next_operation(nodes[-1] if nodes else start)
    if following is not None and following.dropout:
        p = following.dropout
        nodes.append(following.node)
    return nodes, activation, p


def served(*nodes: Any) -> bool:
    """Whether our kernels take the types of these tensors."""
    tensors = [tensor_of(node) for node in nodes if node is not None]
    return all(tensor is not None and tensor.dtype in KERNEL_DTYPES for tensor in tensors)


def is_on_cuda(match: Match) -> bool:
    tensor = tensor_of(match.nodes[0])
    return tensor is not None and tensor.is_cuda


def replacing_dtype(graph: fx.Graph, result: fx.Node, dtype: torch.dtype, match: Match) -> fx.Node:
    """`result`, of type `dtype`, converted to the type that the replaced operations gave.

    Under autocast they may be of different types: a 16-bit linear followed by `pow` or softplus, which give float32.
    """
    before = tensor_of(match.nodes[-1])
    return result if before is None or before.dtype == dtype else graph.call_method("to", (result, before.dtype))


def size_of(node: Any) -> float:
    """Bytes of a node's tensor; 0 where it has none."""
    tensor = tensor_of(node)
    return 0.0 if tensor is None else float(tensor.numel() * tensor.element_size())


def is_differentiated(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return tensor is not None and tensor.requires_grad
