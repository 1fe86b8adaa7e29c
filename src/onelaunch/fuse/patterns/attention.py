"""Attention with a mask that the program computes anew in every call, though it is always the same: causal, or all true.

`transformers` builds the causal mask from `arange` when it is compiled. A kernel that gets it as a tensor reads it in every
layer and computes the half that it hides; told `is_causal`, it does neither.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from onelaunch.fuse.costs import flops_of, size_of
from onelaunch.fuse.graph import tensor_of, written_by
from onelaunch.fuse.patterns.pattern import Match, is_differentiated
from onelaunch.roofline import Cost

PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
MAX_OPERATIONS = 100  # that compute the mask
MAX_ELEMENTS = 2**28  # of the mask: it is computed once, on the CPU, while the model is compiled
KIND = "onelaunch_mask"  # the key of the mask's metadata that holds what it is
CREATORS = ("arange", "ones", "zeros", "full", "tensor", "eye", "new_ones", "new_zeros", "new_full")
RANDOM = (
    "rand",
    "randn",
    "randint",
    "bernoulli",
    "dropout",
    "normal_",
    "uniform_",
    "multinomial",
    "empty",
    "new_empty",
)


class MaskedAttention:
    name = "attention"

    def match(self, node: fx.Node) -> Match | None:
        if node.target is not F.scaled_dot_product_attention:
            return None
        given = {**dict(zip(PARAMETERS, node.args, strict=False)), **node.kwargs}
        mask, query, key = given.get("attn_mask"), tensor_of(given["query"]), tensor_of(given["key"])
        if not isinstance(mask, fx.Node) or given.get("is_causal") or query is None or key is None:
            return None
        if KIND not in mask.meta:
            mask.meta[KIND] = _kind_of(mask)
        kind = mask.meta[KIND]
        if kind is None or (kind == "causal" and query.shape[-2] != key.shape[-2]):
            return None
        return Match(self, (node,), {**given, "kind": kind, "parts": [f"attention ({kind} mask)"]})

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        options: dict[str, Any] = {name: given[name] for name in ("dropout_p", "scale", "enable_gqa") if name in given}
        options["is_causal"] = given["kind"] == "causal"
        return graph.call_function(
            F.scaled_dot_product_attention, (given["query"], given["key"], given["value"]), options
        )

    def cost(self, match: Match) -> Cost:
        given, output = match.arguments, match.nodes[0]
        share = 0.5 if given["kind"] == "causal" else 1.0
        moved = sum(size_of(given[name]) for name in ("query", "key", "value")) + size_of(output)
        forward = Cost(moved, share * flops_of(output), 1)
        return forward + Cost(2 * moved, 2.5 * forward.flops, 2) if is_differentiated(output) else forward

    def pays(self, match: Match) -> bool:
        return True


def _kind_of(mask: fx.Node) -> str | None:
    """ "causal" or "full", if the mask has that value in every call; None otherwise."""
    tensor = tensor_of(mask)
    if tensor is None or tensor.dtype != torch.bool or tensor.dim() < 2 or tensor.numel() > MAX_ELEMENTS:
        return None
    value = _constant_value(mask)
    if value is None or value.shape != tensor.shape:
        return None
    if bool(value.all()):
        return "full"
    rows, columns = value.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and torch.equal(value, causal.expand_as(value)) else None


def _constant_value(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input, computed on the CPU; None if it depends on one, or on chance."""
    needed = _ancestors(node)
    if needed is None:
        return None
    values: dict[fx.Node, Any] = {}
    try:
        for one in node.graph.nodes:
            if one in needed:
                args, kwargs = fx.node.map_arg((one.args, dict(one.kwargs)), values.__getitem__)
                args, kwargs = torch.utils._pytree.tree_map_only(torch.device, _on_cpu, (args, kwargs))
                function: Any = getattr(type(args[0]), str(one.target)) if one.op == "call_method" else one.target
                values[one] = function(*args, **kwargs)
    except (TypeError, RuntimeError, AttributeError, IndexError, ValueError):
        return None
    found = values[node]
    return found if isinstance(found, torch.Tensor) else None


def _on_cpu(device: torch.device) -> torch.device:
    return torch.device("cpu")


def _ancestors(node: fx.Node) -> set[fx.Node] | None:
    """The operations that compute `node`; None if an input, a random number or a change in place is among them."""
    found, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        name = one.target if isinstance(one.target, str) else getattr(one.target, "__name__", "")
        creates = not one.all_input_nodes and name not in CREATORS
        if one.op not in ("call_function", "call_method") or name in RANDOM or creates or written_by(one):
            return None
        if any(written_by(user) and one in written_by(user) for user in one.users) or len(found) > MAX_OPERATIONS:
            return None
        waiting += [source for source in one.all_input_nodes if source not in found]
        found.update(one.all_input_nodes)
    return found
