"""What a pattern is: it finds a chain of operations in a captured graph and replaces it by one of our ops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from onelaunch.fuse.graph import tensor_of, tensors_of
from onelaunch.ops.arguments import KERNEL_DTYPES
from onelaunch.roofline import Cost


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


def served(*nodes: Any) -> bool:
    """Whether our kernels take the types of these tensors."""
    tensors = [tensor_of(node) for node in nodes if node is not None]
    return all(tensor is not None and tensor.dtype in KERNEL_DTYPES for tensor in tensors)


def is_on_cuda(match: Match) -> bool:
    return any(tensor.is_cuda for tensor in tensors_of(match.nodes[0]))


def with_dtype(graph: fx.Graph, result: fx.Node, match: Match, dtype: torch.dtype | None = None) -> fx.Node:
    """`result`, of type `dtype` (by default the first operation's), converted to the type that the last operation gave.

    Under autocast they differ where a 16-bit linear layer is followed by `pow` or softplus, which give float32.
    """
    first, last = tensor_of(match.nodes[0]), tensor_of(match.nodes[-1])
    if first is None or last is None or last.dtype == (dtype or first.dtype):
        return result
    return graph.call_method("to", (result, last.dtype))


def is_differentiated(node: fx.Node) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(node))
