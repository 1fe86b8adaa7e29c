"""(dropout →) (+ residual →) layer norm as `ol.layer_norm`, with gradients. Pre-norm networks use the sum elsewhere too."""

from __future__ import annotations

from typing import Any

from torch import fx

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import addition, operation_of, sole_user, tensor_of, written_by
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served
from onelaunch.ops.norm import MAX_UNITS, layer_norm
from onelaunch.roofline import Cost

MIN_ROWS = 1024  # below, the norm is small beside its launches
Norm = tuple[list[fx.Node], dict[str, Any]]  # operations that compute a norm, and its arguments


class LayerNorm:
    name = "layer_norm"
    op: Any = staticmethod(layer_norm)
    parameters: tuple[str, ...] = ("weight", "bias")

    def norm_at(self, node: fx.Node) -> Norm | None:
        operation = operation_of(node)
        return ([node], operation.arguments) if operation is not None and operation.name == self.name else None

    def match(self, node: fx.Node) -> Match | None:
        """The chain starts with the dropout, with the addition, or with the norm itself."""
        operation, added = operation_of(node), addition(node)
        before, p, x, residual = [node], 0.0, None, None
        if operation is not None and operation.dropout and not written_by(node):
            x, p = operation.arguments["input"], operation.dropout
            user = sole_user(node)
            if user is not None and (added := addition(user, node)) is not None:
                before, residual = [node, user], added[1]
        elif added is not None:
            x, residual = added
        else:
            before = []
        # A norm that is written out starts with a conversion, and is found at the operation after it.
        places = [one for user in before[-1].users for one in (user, *user.users)] if before else [node]
        norms = [norm for norm in map(self.norm_at, places) if norm is not None]
        norms = [norm for norm in norms if not before or norm[1]["input"] is before[-1]]
        if not norms or not self._is_served(*norms[0]):
            return None
        nodes, given = (*before, *norms[0][0]), norms[0][1]
        also = before[-1] if before and not {*before[-1].users} <= {*nodes} else None
        if also is not None and any(user < nodes[-1] for user in also.users if user not in nodes):
            return None  # the replacement would stand behind it
        parts = [*(["dropout"] if p else []), *(["add"] if residual is not None else []), self.name]
        arguments = {**given, "input": x or given["input"], "residual": residual, "dropout": p, "parts": parts}
        return Match(self, nodes, arguments, also)

    def _is_served(self, nodes: list[fx.Node], given: dict[str, Any]) -> bool:
        """Whether the op computes it: over the last dimension, with a weight, all of one type (not so under autocast)."""
        s, y, weight = map(tensor_of, (given["input"], nodes[-1], given["weight"]))
        if s is None or y is None or weight is None or not is_differentiated(nodes[-1]):
            return False
        tensors = [tensor_of(given[name]) for name in self.parameters if given[name] is not None]
        alike = all(
            one is not None and one.shape == s.shape[-1:] and one.dtype == s.dtype == y.dtype for one in tensors
        )
        return alike and isinstance(given["eps"], float | None)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        names = (*self.parameters, "residual", "dropout", "eps")
        options = {name: match.arguments[name] for name in names} | {"return_sum": match.also is not None}
        return graph.call_function(self.op, (match.arguments["input"],), options)

    def cost(self, match: Match) -> Cost:
        """Forward x and the residual are read, the sum and y written; backward the gradients and the sum are read, dx and,
        where dropout makes it another tensor, dresidual are written."""
        size, y, p = size_of(match.nodes[-1]), tensor_of(match.nodes[-1]), match.arguments["dropout"]
        assert y is not None
        residual = match.arguments["residual"] is not None
        passes = 5 + residual + (residual or p > 0) + (match.also is not None) + (residual and p > 0)
        return Cost(passes * size + (y.numel() / 4 if p else 0), 20.0 * y.numel(), 3)

    def pays(self, match: Match) -> bool:
        y = tensor_of(match.nodes[-1])
        if y is None or not served(match.nodes[-1], match.arguments["input"], match.arguments["residual"]):
            return False
        return bool(y.shape[-1] <= MAX_UNITS and y.numel() // y.shape[-1] >= MIN_ROWS)
