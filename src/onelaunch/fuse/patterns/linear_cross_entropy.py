"""linear → cross entropy as `ol.linear_cross_entropy`: the logits are made and used up in chunks of rows.

The loss may also be written as `log_softmax` and `nll_loss`. Between the two may stand what language models put there: a
conversion to float32, views, the shift of the labels, and a number that scales the logits; here it scales input and bias.
"""

from __future__ import annotations

import math
import operator
from itertools import pairwise

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onelaunch.fuse.costs import size_of
from onelaunch.fuse.graph import Operation, are_constants, is_layer, operation_of, sole_user, tensor_of
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served, with_dtype
from onelaunch.ops import linear_cross_entropy
from onelaunch.roofline import Cost

MIN_CLASSES = 4096  # below, the logits are small beside the activations
MAX_BETWEEN = 6  # views, conversions and scales between the two
PRODUCTS, QUOTIENTS = (operator.mul, torch.mul, "mul"), (operator.truediv, torch.div, "div")


class LinearCrossEntropy:
    name = "linear_cross_entropy"

    def match(self, node: fx.Node) -> Match | None:
        operation = operation_of(node)
        if operation is None or operation.name != "linear":
            return None
        logits = tensor_of(node)
        chain, wanted = [node], "cross_entropy"
        while len(chain) <= MAX_BETWEEN and (user := sole_user(chain[-1])) is not None:
            found = operation_of(user)
            if found is not None and found.name == wanted and found.arguments["input"] is chain[-1]:
                return self._matched(operation, found, chain, logits)
            if wanted == "cross_entropy" and found is not None and _is_over_classes(found, chain[-1]):
                wanted = "nll_loss"
            elif wanted == "cross_entropy" and logits is not None and _scales(user, chain[-1]):
                if not _may_scale_input(user, logits.dtype):
                    return None
            elif not _keeps_rows(user, chain[-1]):
                return None
            chain.append(user)
        return None

    def _matched(
        self, linear: Operation, loss: Operation, chain: list[fx.Node], logits: torch.Tensor | None
    ) -> Match | None:
        given, flat, target = loss.arguments, tensor_of(chain[-1]), tensor_of(loss.arguments["target"])
        if logits is None or logits.dim() < 2 or flat is None or target is None or target.is_floating_point():
            return None
        if flat.dim() != 2 or flat.shape[1] != logits.shape[-1] or given["weight"] is not None:
            return None
        if given["reduction"] not in ("mean", "sum") or target.dim() != 1:
            return None
        if not are_constants(given["ignore_index"], given["label_smoothing"]):
            return None
        if given.get("size_average") is not None or given.get("reduce") is not None or not is_layer(linear):
            return None
        tensors = {"x": linear.arguments["input"]} | {name: linear.arguments[name] for name in ("weight", "bias")}
        options = {name: given[name] for name in ("target", "label_smoothing", "ignore_index", "reduction")}
        parts = ["linear", *(["log_softmax"] if loss.name == "nll_loss" else []), loss.name]
        return Match(self, (*chain, loss.node), {**tensors, **options, "parts": parts})

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given, x = match.arguments, tensor_of(match.arguments["x"])
        flat = x is None or x.dim() <= 2
        features = given["x"] if flat else graph.call_method("flatten", (given["x"], 0, -2))
        options = {name: given[name] for name in ("bias", "label_smoothing", "ignore_index", "reduction")}
        for source, user in pairwise(match.nodes[:-1]):
            if _scales(user, source):
                features = _scaled(graph, features, user, source)
                options["bias"] = options["bias"] and _scaled(graph, options["bias"], user, source)
        result = graph.call_function(linear_cross_entropy, (features, given["weight"], given["target"]), options)
        logits = tensor_of(match.nodes[0])
        wide = logits is not None and logits.dtype == torch.float64
        return with_dtype(graph, result, match, torch.float64 if wide else torch.float32)

    def cost(self, match: Match) -> Cost:
        """The products as they are; of the logits, only chunks that may stay in the cache."""
        logits, weight = tensor_of(match.nodes[0]), tensor_of(match.arguments["weight"])
        assert logits is not None and weight is not None  # noqa: PT018
        product = 2.0 * logits.numel() * weight.shape[1]
        moved = size_of(match.arguments["x"]) + size_of(match.arguments["weight"]) + 2 * size_of(match.nodes[0])
        passes = 3 if is_differentiated(match.nodes[-1]) else 1
        return Cost(passes * moved, passes * product, 3 * passes)

    def pays(self, match: Match) -> bool:
        weight = tensor_of(match.arguments["weight"])
        large = weight is not None and int(weight.shape[0]) >= MIN_CLASSES
        return large and served(match.arguments["x"], match.arguments["weight"])


def _is_over_classes(operation: Operation, source: fx.Node) -> bool:
    """Whether this is the log softmax of each row of `source`, in its own type or in float32."""
    given, logits = operation.arguments, tensor_of(source)
    if operation.name != "log_softmax" or logits is None or given["input"] is not source:
        return False
    return given["dim"] in (-1, logits.dim() - 1) and given["dtype"] in (None, logits.dtype, torch.float32)


def _scales(user: fx.Node, source: fx.Node) -> bool:
    """Whether `user` is `source` multiplied or divided by a number that is the same in every call."""
    before, after = tensor_of(source), tensor_of(user)
    numbers = [value for value in user.args if value is not source]
    if len(user.args) != 2 or len(numbers) != 1 or not are_constants(*numbers) or user.kwargs:
        return False
    known = user.target in PRODUCTS or (user.target in QUOTIENTS and user.args[0] is source)
    return known and before is not None and after is not None and before.dtype == after.dtype


def _may_scale_input(user: fx.Node, dtype: torch.dtype) -> bool:
    """Whether the input of a layer of this type may be scaled instead of its output.

    bfloat16 rounds nothing if the number is a power of two; an input of float16 may overflow, where logits in float32 do not.
    """
    (number,) = (value for value in user.args if isinstance(value, int | float))
    return dtype in (torch.float32, torch.float64) or (dtype == torch.bfloat16 and abs(math.frexp(number)[0]) == 0.5)


def _scaled(graph: fx.Graph, value: fx.Node, user: fx.Node, source: fx.Node) -> fx.Node:
    """`value` scaled as `user` scales `source`."""
    return graph.create_node(user.op, user.target, tuple(value if one is source else one for one in user.args))


def _keeps_rows(user: fx.Node, source: fx.Node) -> bool:
    """Whether `user` is a view of `source` with the same rows of classes in the same order, or the conversion to float32.

    A conversion to a narrower type rounds the logits, and the op computes no wider loss than in float32.
    """
    before, after = tensor_of(source), tensor_of(user)
    if (
        before is None
        or after is None
        or not statically_known_true(before.numel() == after.numel())
        or before.shape[-1:] != after.shape[-1:]
    ):
        return False
    widens = after.dtype == torch.float32 and before.dtype in (torch.float16, torch.bfloat16)
    converts = user.op == "call_method" and user.target in ("float", "to", "contiguous", "view", "reshape", "flatten")
    same = user.args[0] is source and after.device == before.device and (widens or after.dtype == before.dtype)
    return converts and same and after.is_floating_point()
