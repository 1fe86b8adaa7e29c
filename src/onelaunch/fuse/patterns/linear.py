"""linear → activation → dropout as `ol.linear`: the epilogue of the GEMM writes the result once.

Unfused, the activation and the dropout each read and write `rows x outputs` values, and the mask takes a byte per element
where the op keeps a bit. BERT-base (32 x 128, bf16, forward and backward, H200): 8.59 → 7.97 ms with 72 matches.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from onelaunch.activations import saves_input
from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import is_layer, operation_of, sole_user, storages_of, tensor_of, written_by
from onelaunch.fuse.patterns.pattern import Match, epilogue, is_differentiated, served, with_dtype
from onelaunch.ops import linear
from onelaunch.ops.linear_reference import backward_needs
from onelaunch.roofline import Cost


class LinearActivationDropout:
    name = "linear"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or operation.name not in ("linear", "addmm") or not is_layer(operation):
            return None
        view = _view_of_rows(node) if operation.name == "addmm" else None
        nodes, activation, p = epilogue(view or node)
        if not nodes or (backward_needs(activation, p) == "output" and _is_changed_later(nodes[-1])):
            return None
        parts = ["linear", *([activation] if activation else []), *(["dropout"] if p else [])]
        arguments = {**operation.arguments, "activation": activation, "p": p, "parts": parts}
        arguments |= {"transposed": operation.name == "addmm", "view": view.args[1:] if view is not None else None}
        return Match(self, (node, *([view] if view is not None else []), *nodes), arguments)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        weight = graph.call_method("t", (given["weight"],)) if given["transposed"] else given["weight"]
        options = {"activation": given["activation"], "dropout": given["p"]}
        result = graph.call_function(linear, (given["input"], weight, given["bias"]), options)
        if given["view"] is not None:
            result = graph.call_method("view", (result, *given["view"]))
        return with_dtype(graph, result, match)

    def cost(self, match: Match) -> Cost:
        given = match.arguments
        weight, output = tensor_of(given["weight"]), tensor_of(match.nodes[-1])
        assert weight is not None and output is not None  # noqa: PT018
        inner = weight.shape[0] if given["transposed"] else weight.shape[-1]
        product = 2.0 * output.numel() * inner
        moved = size_of(given["input"]) + size_of(given["weight"]) + size_of(match.nodes[-1])
        mask = output.numel() / 8 if given["p"] else 0.0
        saved = size_of(match.nodes[-1]) if saves_input(given["activation"]) else 0.0
        if not is_differentiated(match.nodes[-1]):
            return Cost(moved, product, 1)
        # Backward: dz from dy and what was saved, then dx and dW as products.
        backward = 2 * size_of(match.nodes[-1]) + saved + mask + 2 * moved
        return Cost(moved + saved + mask + backward, 3 * product, 4)

    def pays(self, match: Match) -> bool:
        """Not for weights stored as [inputs, outputs], which would be transposed first (GPT-2's step: 22.6, not 22.3 ms).

        Not for the gate of a gated MLP either: the product with the other half reads it anyway, and Inductor computes the
        activation there (a Llama-like model: 17.1 instead of 16.5 ms, and 400 MB more).
        """
        gated = all(user.target in (operator.mul, torch.mul, "mul") for user in match.nodes[-1].users)
        stored_alike = not match.arguments["transposed"]
        return stored_alike and not gated and served(match.arguments["input"], match.arguments["weight"])


def _view_of_rows(node: fx.Node) -> fx.Node | None:
    """The only user of `node`, if it is a view that keeps the last dimension, as after the products of `Conv1D`."""
    user, before = sole_user(node), tensor_of(node)
    after = tensor_of(user)
    if user is None or user.op != "call_method" or user.target != "view" or before is None or after is None:
        return None
    return user if after.shape[-1] == before.shape[-1] else None


def _is_changed_later(result: fx.Node) -> bool:
    """Whether a later operation changes this value or a view of it, as no value may be that is saved for the backward pass."""
    memory, node = storages_of(result), result.next
    while node.op != "output":
        if storages_of(*written_by(node)) & memory:
            return True
        node = node.next
    return False
