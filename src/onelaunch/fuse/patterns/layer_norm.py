"""Layer norm with our backward pass. The forward pass stays in operations that Inductor fuses with their neighbours."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import tensor_of
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served
from onelaunch.ops import layer_norm
from onelaunch.roofline import Cost

PARAMETERS = ("input", "normalized_shape", "weight", "bias", "eps")
MIN_ROWS = 1024  # below, the norm is small beside its launches
MAX_UNITS = 8192  # a row is held in registers


class LayerNorm:
    name = "layer_norm"

    def match(self, node: fx.Node) -> Match | None:
        if node.target is not F.layer_norm:
            return None
        given = {"bias": None, "eps": 1e-5, **dict(zip(PARAMETERS, node.args, strict=False)), **node.kwargs}
        x, weight, bias, y = map(tensor_of, (given["input"], given.get("weight"), given["bias"], node))
        if x is None or weight is None or y is None or weight.dim() != 1 or not is_differentiated(node):
            return None
        if (given["bias"] is not None) != (bias is not None) or x.shape[-1] != weight.shape[0]:
            return None
        types = {one.dtype for one in (x, weight, bias, y) if one is not None}  # they differ under autocast
        if len(types) > 1 or not isinstance(given["eps"], float):
            return None
        return Match(self, (node,), {**given, "parts": ["layer_norm"]})

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given = match.arguments
        return graph.call_function(layer_norm, (given["input"], given["weight"], given["bias"]), {"eps": given["eps"]})

    def cost(self, match: Match) -> Cost:
        """Forward x is read and y written; backward x and dy are read and dx is written."""
        size, tensor = size_of(match.nodes[0]), tensor_of(match.nodes[0])
        assert tensor is not None
        return Cost(5 * size, 20.0 * tensor.numel(), 3)

    def pays(self, match: Match) -> bool:
        x = tensor_of(match.arguments["input"])
        if x is None or not served(match.arguments["input"]):
            return False
        return bool(x.shape[-1] <= MAX_UNITS and x.numel() // x.shape[-1] >= MIN_ROWS)
