"""A small MLP as one op: linear → activation → … → linear, with one activation throughout.

The kernels of a small network, as in reinforcement learning, mostly wait for their launch and for the first bytes. An MLP
8-64-64-4 (256 rows, fp32, Adam, H200) takes 60.9 µs per step with a kernel per layer and product, and 29.3 with this pattern;
16-128-128-8 (1024 rows) 126.4 and 44.1 µs, in bf16 48.9 and 32.8.
"""

from __future__ import annotations

import math

from torch import fx

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import (
    Operation,
    is_parameter_layer,
    next_operation,
    number_of_values,
    operation_of,
    shape_of,
    tensor_of,
)
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served
from onelaunch.ops.mlp import mlp
from onelaunch.roofline import Cost

MAX_LAYERS = 8
MAX_WIDTH = 128  # H200, 17-256-256-6, 256 rows: fp32 74.4 µs per step, with the pattern 86.0; bf16 53.0 and 53.6
MAX_ROWS = 2**14  # more were not measured: 97.5 and 63.7 µs


class SmallMlp:
    name = "mlp"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or not _is_plain(operation):
            return None
        layers, nodes, activation = [operation], [node], None
        while found := _next_layer(nodes[-1], activation):
            between, following, activation = found
            layers.append(following)
            nodes += [*between, following.node]
        if not 2 <= len(layers) <= MAX_LAYERS:
            return None
        weights, biases = ([layer.arguments[name] for layer in layers] for name in ("weight", "bias"))
        arguments = {
            "input": operation.arguments["input"], "weights": weights, "biases": biases, "activation": activation,
            "parts": ["linear", *[activation, "linear"] * (len(layers) - 1)],
        }  # fmt: skip
        return Match(self, tuple(nodes), arguments)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        return graph.call_function(mlp, (given["input"], given["weights"], given["biases"], given["activation"]))

    def cost(self, match: Match) -> Cost:
        """The hidden layers' values are written once and read in the backward pass; one launch forward and two backward."""
        given, last = match.arguments, match.nodes[-1]
        parameters = sum(map(size_of, (*given["weights"], *given["biases"])))
        widths = [shape_of(weight) for weight in given["weights"]]
        output = tensor_of(last)
        assert output is not None
        rows = math.prod(output.shape[:-1])
        flops = sum(2.0 * rows * outputs * inputs for outputs, inputs in widths)
        hidden = rows * sum(outputs for outputs, _ in widths[:-1]) * output.element_size()
        moved = size_of(given["input"]) + parameters + size_of(last) + hidden
        return Cost(moved, flops, 1) + (Cost(2 * moved, 2 * flops, 2) if is_differentiated(last) else Cost())

    def pays(self, match: Match) -> bool:
        """For few rows: many fill the device, and a library's products use it better."""
        given, weights = match.arguments, match.arguments["weights"]
        source = tensor_of(given["input"])
        if source is None or not served(given["input"], *weights):
            return False
        return number_of_values(source) <= MAX_ROWS * source.shape[-1]


def _is_plain(operation: Operation) -> bool:
    """A narrow linear layer of parameters, with constant sizes."""
    return is_parameter_layer(operation) and max(shape_of(operation.arguments["weight"])) <= MAX_WIDTH


def _next_layer(node: fx.Node, activation: str | None) -> tuple[list[fx.Node], Operation, str] | None:
    """The operations between two layers, the next layer, and the name of the activation, which must be this one if given."""
    following = next_operation(node)
    if (
        following is None
        or following.activation is None
        or following.activation != (activation or following.activation)
    ):
        return None
    between = [following.node]
    name, following = following.activation, next_operation(following.node)
    if following is not None and following.dropout == 0.0:  # in evaluation
        between.append(following.node)
        following = next_operation(following.node)
    return (between, following, name) if following is not None and _is_plain(following) else None
