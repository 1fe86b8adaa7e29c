"""Linear layers with one input, such as query, key and value or the two halves of a gated MLP, as one product.

Each of BERT's products of 4096 x 768 by 768 x 768 fills an H200's multiprocessors 1.45 times, so a quarter of them waits. One
product of three times the width fills them 4.4 times. Backward, the input's gradient is one product too, without additions.
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
import torch.nn.functional as F
from torch import fx

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import (
    Operation,
    is_parameter_layer,
    number_of_values,
    operation_of,
    shape_of,
    tensor_of,
    tensors_of,
)
from onelaunch.fuse.memory import is_written_after, storages_of
from onelaunch.fuse.modes import share_mode
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served
from onelaunch.fuse.strides import may_be_sliced
from onelaunch.roofline import Cost

# Outputs of one layer. Larger products fill the device by themselves: a Llama-like model (8192 rows, 1024 wide) takes 18.0 ms
# per step with its layers apart and 20.2 ms with them as one; BERT (4096 rows, 768 wide) takes 7.05 and 6.72 ms.
MAX_OUTPUTS = 5_000_000
REACHING = "onelaunch_reaching"  # the key of the output's metadata that holds the operations with a way to gradients
MADE = "onelaunch_parallel_linear"  # the key of the first layer's metadata that holds the one product, once it is made


class ParallelLinear:
    """A match is one of the layers; the first that is replaced makes the product, and each takes its columns of it."""

    name = "parallel_linear"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or not _is_plain(operation):
            return None
        source = operation.arguments["input"]
        layers = [one for one in map(operation_of, source.users) if one is not None and _is_plain(one)]
        layers = [one for one in layers if _alike(one, operation)]
        if len(layers) < 2:
            return None
        read = storages_of(*(one for layer in layers for one in layer.node.all_input_nodes))
        if is_written_after(layers[0].node, read):
            return None
        arguments = {
            "input": source, "weights": tuple(one.arguments["weight"] for one in layers),
            "biases": tuple(one.arguments["bias"] for one in layers), "index": [one.node for one in layers].index(node),
            "made": layers[0].node.meta.setdefault(MADE, {}), "parts": [f"linear ({len(layers)} as one)"],
        }  # fmt: skip
        return Match(self, (node,), arguments)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        made, weights = given["made"], given["weights"]
        if "parts" not in made:
            weight, bias = graph.call_function(torch.cat, (weights,)), None
            if any(one is not None for one in given["biases"]):  # a key of attention often has none
                pairs = zip(given["biases"], weights, strict=True)
                biases = [
                    b if b is not None else graph.call_method("new_zeros", (w, shape_of(w)[:1])) for b, w in pairs
                ]
                bias = graph.call_function(torch.cat, (biases,))
            product = graph.call_function(F.linear, (given["input"], weight, bias))
            made["parts"] = graph.call_method("split", (product, [shape_of(one)[0] for one in weights], -1))
        return graph.call_function(operator.getitem, (made["parts"], given["index"]))

    def cost(self, match: Match) -> Cost:
        """The layer's part of the one product and of the copy of the weights; the launches are the first layer's."""
        given, output = match.arguments, match.nodes[0]
        weight = given["weights"][given["index"]]
        rows, launches = size_of(given["input"]) / len(given["weights"]), 2 if given["index"] == 0 else 0
        result = tensor_of(output)
        assert result is not None
        product = 2.0 * result.numel() * shape_of(weight)[1]
        moved = rows + 3 * size_of(weight) + size_of(output)
        passes = 3 if is_differentiated(output) else 1
        return Cost(passes * moved, passes * product, passes * launches)

    def pays(self, match: Match) -> bool:
        """The copy of the weights must be small beside the outputs; for a few rows it would take longer than the products."""
        source, weights = tensor_of(match.arguments["input"]), match.arguments["weights"]
        if source is None or not served(match.arguments["input"], *weights):
            return False
        rows, widths = number_of_values(source) // source.shape[-1], [shape_of(one)[0] for one in weights]
        return bool(rows >= sum(widths) and rows * max(widths) <= MAX_OUTPUTS)


def without_parts(matches: list[Match]) -> list[Match]:
    """`matches` without those of products that lack a layer: another pattern took it, and it would be computed twice."""
    found = Counter(id(match.arguments["made"]) for match in matches if "made" in match.arguments)
    return [
        match for match in matches
        if "made" not in match.arguments or found[id(match.arguments["made"])] == len(match.arguments["weights"])
    ]  # fmt: skip


def _is_plain(operation: Operation) -> bool:
    """A linear layer of parameters, whose result may be columns of a product, and is differentiated if it can be."""
    if not is_parameter_layer(operation):
        return False
    if is_differentiated(operation.node) and not _reaches_gradients(operation.node):
        return False  # as part of a product its parameters would have gradients of 0 instead of none
    return may_be_sliced(operation.node)


def _alike(one: Operation, other: Operation) -> bool:
    """Whether two layers with one input can be one product: alike in type, mode and gradients."""
    mine, theirs = tensor_of(one.arguments["weight"]), tensor_of(other.arguments["weight"])
    same_type = mine is not None and theirs is not None and mine.dtype == theirs.dtype
    differentiated = is_differentiated(one.node) == is_differentiated(other.node)
    same = same_type and differentiated and share_mode((one.node, other.node))
    return same and one.arguments["input"] is other.arguments["input"]


def _reaches_gradients(node: fx.Node) -> bool:
    """Whether a result of the graph that has gradients depends on `node` by operations that have them."""
    meta = node.graph.output_node().meta
    if REACHING not in meta:
        ways: set[fx.Node] = set()  # operations with gradients that reach one, and the output itself
        meta[REACHING] = reaching = set()
        for one in reversed(node.graph.nodes):
            if not ways.isdisjoint(one.users):
                reaching.add(one)
            if one.op == "output" or (one in reaching and any(tensor.requires_grad for tensor in tensors_of(one))):
                ways.add(one)
    return node in meta[REACHING]
