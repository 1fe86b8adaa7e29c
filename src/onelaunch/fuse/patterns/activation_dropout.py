"""relu → dropout as `ol.relu_dropout`: one pass, one bit per element saved for the backward pass."""

from __future__ import annotations

from torch import fx

from onelaunch.fuse.costs import is_library_call, size_of
from onelaunch.fuse.graph import next_operation, operation_of, tensor_of
from onelaunch.fuse.memory import written_by
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served, with_dtype
from onelaunch.ops import relu_dropout
from onelaunch.roofline import Cost


class ReluDropout:
    name = "relu_dropout"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or operation.activation != "relu":
            return None
        following = next_operation(node)
        if following is None or not following.dropout or written_by(node):  # the op would leave the input as it is
            return None
        arguments = {**operation.arguments, "p": following.dropout, "parts": ["relu", "dropout"]}
        return Match(self, (node, following.node), arguments)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        result = graph.call_function(relu_dropout, (match.arguments["input"], match.arguments["p"]))
        return with_dtype(graph, result, match)

    def cost(self, match: Match) -> Cost:
        size, output = size_of(match.nodes[-1]), tensor_of(match.nodes[-1])
        assert output is not None
        if not is_differentiated(match.nodes[-1]):
            return Cost(2 * size, output.numel(), 1)
        return Cost(4 * size + output.numel() / 4, 3.0 * output.numel(), 2)

    def pays(self, match: Match) -> bool:
        """Where the input is in memory anyway. An addition or a norm before it Inductor computes in the same kernel, and its
        gradient too, so that two passes over memory are saved, where the op saves the random numbers and 7/8 of the mask.
        """
        source = match.arguments["input"]
        return served(source) and (source.op == "placeholder" or is_library_call(source))
