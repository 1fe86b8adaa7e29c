"""batch norm → activation → dropout as `ol.batch_norm`: normalisation, activation and mask in one pass each way."""

from __future__ import annotations

from torch import fx

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import are_constants, operation_of, tensor_of
from onelaunch.fuse.patterns.pattern import Match, epilogue, is_differentiated, served, with_dtype
from onelaunch.ops import batch_norm
from onelaunch.roofline import Cost


class BatchNormActivationDropout:
    name = "batch_norm"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or operation.name != "batch_norm":
            return None
        given = operation.arguments
        constants = isinstance(given["training"], bool) and are_constants(given["momentum"], given["eps"])
        nodes, activation, p = epilogue(node)
        if not constants or not nodes or (p and not given["training"]):  # the op drops nothing in evaluation
            return None
        parts = ["batch_norm", *([activation] if activation else []), *(["dropout"] if p else [])]
        return Match(self, (node, *nodes), {**given, "activation": activation, "p": p, "parts": parts})

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        tensors = (given["input"], given["running_mean"], given["running_var"], given["weight"], given["bias"])
        options = {name: given[name] for name in ("training", "momentum", "eps", "activation")}
        result = graph.call_function(batch_norm, tensors, {**options, "dropout": given["p"]})
        return with_dtype(graph, result, match)

    def cost(self, match: Match) -> Cost:
        """Training reads x twice and writes y forward, reads x and dy twice and writes dx backward."""
        size = size_of(match.nodes[-1])
        output = tensor_of(match.nodes[-1])
        assert output is not None
        if not match.arguments["training"]:
            return Cost(2 * size, 4.0 * output.numel(), 1)
        mask = output.numel() / 8
        if not is_differentiated(match.nodes[-1]):
            return Cost(3 * size, 8.0 * output.numel(), 2)
        return Cost(8 * size + 2 * mask, 20.0 * output.numel(), 4)

    def pays(self, match: Match) -> bool:
        """Only in training, of rows, with dropout: there the op was measured to win (65536 x 1024, 1.5 to 2.2 times).

        Over images without dropout it gains nothing (ResNet-50 10.79 and 10.85 ms per step, ResNet-18 2,455 and 2,568 µs).
        """
        x = tensor_of(match.arguments["input"])
        rows = x is not None and x.dim() == 2
        return rows and match.arguments["training"] and match.arguments["p"] > 0 and served(match.arguments["input"])
