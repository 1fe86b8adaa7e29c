"""Attention with a mask that the program computes anew in every call, though it is always the same: causal, or hiding nothing.

`transformers` builds the causal mask from `arange` when it is compiled, users of PyTorch's transformer layers build it by
`generate_square_subsequent_mask`. A kernel that gets it as a tensor reads it in every layer and computes the half that it
hides; told `is_causal`, it does neither.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from onelaunch.fuse.costs import flops_of, size_of
from onelaunch.fuse.graph import name_of, tensor_of, value_of
from onelaunch.fuse.memory import memory_written_by, storages_of, written_by
from onelaunch.fuse.patterns.pattern import Match, is_differentiated
from onelaunch.roofline import Cost

PARAMETERS: dict[Any, tuple[str, ...]] = {
    F.scaled_dot_product_attention: (
        "query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa",
    ),
    F.multi_head_attention_forward: tuple(inspect.signature(F.multi_head_attention_forward).parameters),
}  # fmt: skip
LAYER_OPTIONS = ("key_padding_mask", "bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")  # with none of them
MAX_OPERATIONS = 100  # that compute the mask
MAX_ELEMENTS = 2**28  # of the mask: it is computed once, on the CPU, while the model is compiled
KIND = "onelaunch_mask"  # the key of the mask's metadata that holds what it is
CREATORS = ("arange", "ones", "zeros", "full", "tensor", "eye", "new_ones", "new_zeros", "new_full")


class MaskedAttention:
    name = "attention"

    def match(self, node: fx.Node) -> Match | None:
        if node.op != "call_function" or node.target not in PARAMETERS:
            return None
        given = {**dict(zip(PARAMETERS[node.target], node.args, strict=False)), **node.kwargs}
        mask, query, key = given.get("attn_mask"), tensor_of(given["query"]), tensor_of(given["key"])
        if not isinstance(mask, fx.Node) or given.get("is_causal") or query is None or key is None:
            return None
        if KIND not in mask.meta:
            mask.meta[KIND] = _kind_of(mask)
        kind, layer = mask.meta[KIND], node.target is F.multi_head_attention_forward
        if kind is None or not (_is_plain_layer(given, kind) if layer else _fits(mask, query, key)):
            return None
        return Match(self, (node,), {**given, "kind": kind, "parts": [f"attention ({kind} mask)"]})

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        if match.nodes[0].target is F.multi_head_attention_forward:
            named = {name: given[name] for name in PARAMETERS[F.multi_head_attention_forward] if name in given}
            return graph.call_function(F.multi_head_attention_forward, (), {**named, "is_causal": True})
        options: dict[str, Any] = {name: given[name] for name in ("dropout_p", "scale", "enable_gqa") if name in given}
        options["is_causal"] = given["kind"] == "causal"
        tensors = given["query"], given["key"], given["value"]
        return graph.call_function(F.scaled_dot_product_attention, tensors, options)

    def cost(self, match: Match) -> Cost:
        given, output = match.arguments, match.nodes[0]
        share = 0.5 if given["kind"] == "causal" else 1.0
        read, written = sum(size_of(given[name]) for name in ("query", "key", "value")), size_of(output)
        forward = Cost(read + written, share * flops_of(output), 1)
        return forward + Cost(2 * read + written, 2.5 * forward.flops, 2) if is_differentiated(output) else forward

    def pays(self, match: Match) -> bool:
        return True


def _is_plain_layer(given: dict[str, Any], kind: str) -> bool:
    """Whether a call of a whole layer computes the same if it is told that its mask of numbers is causal.

    A true value in a mask hides a position there; here it leaves one.
    """
    query, key, mask = (tensor_of(given[name]) for name in ("query", "key", "attn_mask"))
    assert query is not None and key is not None and mask is not None  # noqa: PT018
    plain = given.get("need_weights", True) is False and not any(given.get(name) for name in LAYER_OPTIONS)
    return plain and kind == "causal" and mask.is_floating_point() and mask.shape == (len(query), len(key))


def _kind_of(mask: fx.Node) -> str | None:
    """ "causal" or "full", if the mask has that value in every call; None otherwise."""
    tensor = tensor_of(mask)
    if tensor is None or tensor.dim() < 2 or tensor.numel() > MAX_ELEMENTS:
        return None
    if tensor.dtype != torch.bool and not tensor.is_floating_point():
        return None
    values: dict[fx.Node, Any] = {}
    changed = {one for node in mask.graph.nodes for one in memory_written_by(node)}
    try:
        with _SameInEveryCall():
            value = value_of(mask, values, lambda node: len(values) < MAX_OPERATIONS and _is_constant(node, changed))
        as_captured = all(_is_like(value, tensor_of(node)) for node, value in values.items())
        return _kind_of_value(_seen(value.cpu())) if as_captured else None
    except (TypeError, RuntimeError, AttributeError, IndexError, ValueError):
        return None


def _is_like(value: Any, captured: torch.Tensor | None) -> bool:
    """Whether a value has the shape and type that it had when it was captured, as under autocast."""
    if captured is None or not isinstance(value, torch.Tensor):
        return True
    return value.shape == captured.shape and value.dtype == captured.dtype


def _seen(value: torch.Tensor) -> torch.Tensor:
    """Which positions a mask leaves: those that are true, or to whose scores it adds 0. Raises ValueError for other weights."""
    if value.dtype == torch.bool:
        return value
    if not bool(((value == 0) | (value <= torch.finfo(value.dtype).min)).all()):
        raise ValueError("weights")
    return value == 0


def _kind_of_value(value: torch.Tensor) -> str | None:
    if bool(value.all()):
        return "full"
    rows, columns = value.shape[-2:]
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and torch.equal(value, causal.expand_as(value)) else None


def _fits(mask: fx.Node, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the mask can be expanded to the scores; where not, PyTorch raises."""
    given, scores = tensor_of(mask), (*query.shape[:-1], key.shape[-2])
    if given is None or given.dim() > len(scores):
        return False
    pairs = zip(reversed(given.shape), reversed(scores), strict=False)
    return all(one in (1, two) for one, two in pairs)


def _is_constant(node: fx.Node, changed: set[int]) -> bool:
    """Whether an operation is no input, and its memory not among what is changed in place."""
    if node.op not in ("call_function", "call_method") or (not node.all_input_nodes and name_of(node) not in CREATORS):
        return False
    return not written_by(node) and not storages_of(node) & changed


class _SameInEveryCall(TorchDispatchMode):
    """Inside, an operator raises ValueError if its results may differ: random numbers, memory as it is, or a library's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        varies = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.overloadpacket.__name__
        if varies or func.namespace not in ("aten", "prim", "prims"):
            raise ValueError(str(func))
        return func(*args, **(kwargs or {}))
