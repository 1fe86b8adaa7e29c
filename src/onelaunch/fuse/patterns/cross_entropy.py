"""cross entropy as `ol.cross_entropy`: one pass over the logits for the loss and its gradient together."""

from __future__ import annotations

from torch import fx

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import operation_of, tensor_of
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served
from onelaunch.fuse.roofline import Cost
from onelaunch.ops import cross_entropy

MIN_CLASSES = 1024  # below, Inductor's two kernels are launched together with their neighbours and take as long


class CrossEntropy:
    name = "cross_entropy"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or operation.name != "cross_entropy":
            return None
        given = operation.arguments
        logits, target = tensor_of(given["input"]), tensor_of(given["target"])
        if logits is None or target is None or target.is_floating_point() or logits.dim() != 2:
            return None
        if given["weight"] is not None or given.get("size_average") is not None or given.get("reduce") is not None:
            return None
        return Match(self, (node,), {**given, "parts": ["cross_entropy"]})

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        options = {name: given[name] for name in ("label_smoothing", "ignore_index", "reduction")}
        return graph.call_function(cross_entropy, (given["input"], given["target"]), options)

    def cost(self, match: Match) -> Cost:
        size, logits = size_of(match.arguments["input"]), tensor_of(match.arguments["input"])
        assert logits is not None
        passes = 2 if is_differentiated(match.nodes[-1]) else 1
        return Cost(passes * size, 5.0 * logits.numel(), 1 + passes)

    def pays(self, match: Match) -> bool:
        logits = tensor_of(match.arguments["input"])
        return logits is not None and int(logits.shape[1]) >= MIN_CLASSES and served(match.arguments["input"])
