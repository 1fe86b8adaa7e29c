"""Activations that a model writes out in elementary operations, as GPT-2 does with its GELU: recognised by their values."""

from __future__ import annotations

import operator

import torch
from torch import fx

from onelaunch.activations import ACTIVATIONS
from onelaunch.fuse.graph import value_of

ELEMENTARY = {
    operator.add, operator.mul, operator.sub, operator.truediv, operator.pow, operator.neg, torch.add, torch.mul, torch.sub,
    torch.div, torch.pow, torch.tanh, torch.erf, torch.sigmoid, torch.exp, torch.sqrt, torch.square, torch.neg,
}  # fmt: skip
METHODS = {"add", "mul", "sub", "div", "pow", "tanh", "erf", "sigmoid", "exp", "square", "neg"}
MAX_OPERATIONS = 12
TOLERANCE = 1e-9  # in float64: a formula, not an approximation of one


def handwritten_activation(source: fx.Node) -> tuple[str, list[fx.Node]] | None:
    """The activation that the users of `source` compute together, and their nodes; None where they compute no such thing."""
    if not all(map(_is_elementary, source.users)):
        return None
    inside: list[fx.Node] = []
    node = source.next
    while node.op != "output" and len(inside) < MAX_OPERATIONS:
        if _is_elementary(node) and node.all_input_nodes and {*node.all_input_nodes} <= {source, *inside}:
            inside.append(node)
            closed = len(inside) > 1 and _is_closed(source, inside)
            if closed and (name := _name_of(source, inside)) is not None:
                return name, inside
        elif inside and not (set(source.users) - set(inside)):
            break
        node = node.next
    return None


def _is_elementary(node: fx.Node) -> bool:
    return node.target in (METHODS if node.op == "call_method" else ELEMENTARY)


def _is_closed(source: fx.Node, inside: list[fx.Node]) -> bool:
    """Whether only the last node's value is used outside, and the source's only inside."""
    known = set(inside)
    return set(source.users) <= known and all(set(node.users) <= known for node in inside[:-1])


def _name_of(source: fx.Node, inside: list[fx.Node]) -> str | None:
    z = torch.linspace(-8, 8, 97, dtype=torch.float64)
    try:
        result = value_of(inside[-1], {source: z}, _is_elementary)
    except (TypeError, RuntimeError):
        return None
    if not isinstance(result, torch.Tensor) or result.shape != z.shape:
        return None
    found = (
        name for name, entry in ACTIVATIONS.items() if torch.allclose(result, entry.value(z), rtol=0, atol=TOLERANCE)
    )
    return next(found, None)
