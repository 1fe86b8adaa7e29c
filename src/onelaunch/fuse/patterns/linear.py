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
from onelaunch.fuse.graph import Operation, is_layer, next_operation, operation_of, tensor_of
from onelaunch.fuse.handwritten import handwritten_activation
from onelaunch.fuse.memory import is_written_after, memory_leaves, storages_of
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served, with_dtype
from onelaunch.ops import linear
from onelaunch.ops.linear_reference import backward_needs
from onelaunch.roofline import Cost

SAVE_THEIR_OUTPUT = ("relu", "tanh", "sigmoid")  # in PyTorch; the others save their input


class LinearActivationDropout:
    name = "linear"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or operation.name != "linear" or not is_layer(operation):
            return None
        nodes, activation, p = _epilogue(node)
        if not nodes or (backward_needs(activation, p) == "output" and _may_be_written(nodes[-1], activation, p)):
            return None
        parts = ["linear", *([activation] if activation else []), *(["dropout"] if p else [])]
        arguments = {**operation.arguments, "activation": activation, "p": p, "parts": parts}
        return Match(self, (node, *nodes), arguments)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        options = {"activation": given["activation"], "dropout": given["p"]}
        result = graph.call_function(linear, (given["input"], given["weight"], given["bias"]), options)
        return with_dtype(graph, result, match)

    def cost(self, match: Match) -> Cost:
        given = match.arguments
        weight, output = tensor_of(given["weight"]), tensor_of(match.nodes[-1])
        assert weight is not None and output is not None  # noqa: PT018
        product = 2.0 * output.numel() * weight.shape[-1]
        moved = size_of(given["input"]) + size_of(given["weight"]) + size_of(match.nodes[-1])
        mask = output.numel() / 8 if given["p"] else 0.0
        saved = size_of(match.nodes[-1]) if saves_input(given["activation"]) else 0.0
        if not is_differentiated(match.nodes[-1]):
            return Cost(moved, product, 1)
        # Backward: dz from dy and what was saved, then dx and dW as products.
        backward = 2 * size_of(match.nodes[-1]) + saved + mask + 2 * moved
        return Cost(moved + saved + mask + backward, 3 * product, 4)

    def pays(self, match: Match) -> bool:
        return not is_gate(match.nodes[-1]) and served(match.arguments["input"], match.arguments["weight"])


def _epilogue(start: fx.Node) -> tuple[list[fx.Node], str | None, float]:
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


def _may_be_written(result: fx.Node, activation: str | None, p: float) -> bool:
    """Whether the result, which our op saves for the backward pass, may be changed in place, in the graph or by its caller.

    A caller may not change what PyTorch's own operation saves.
    """
    memory = storages_of(result)
    if is_written_after(result, memory):
        return True
    saved_by_pytorch = activation in SAVE_THEIR_OUTPUT and not p
    return is_differentiated(result) and not saved_by_pytorch and memory_leaves(result.graph, memory)


def is_gate(result: fx.Node) -> bool:
    """Whether a value is the gate of a gated MLP: the product with the other half reads it anyway, and Inductor computes the
    activation there (a Llama-like model: 16.5 ms, with the pattern 17.1 and 400 MB more).
    """
    return all(user.target in (operator.mul, torch.mul, "mul") for user in result.users)
