"""convolution → batch norm (evaluation) → + residual → relu as one call of cuDNN's fused convolution, without gradients."""

from __future__ import annotations

import torch
from torch import fx

from onelaunch.fuse.costs import flops_of, size_of
from onelaunch.fuse.graph import are_constants, name_of, next_operation, operation_of, sole_user, tensor_of
from onelaunch.fuse.memory import written_by
from onelaunch.fuse.patterns.pattern import Match, is_differentiated, served, with_dtype
from onelaunch.ops.conv_batch_norm_relu import conv_batch_norm_relu
from onelaunch.roofline import Cost

CHANNEL_MULTIPLE = 8  # cuDNN's fused convolutions read 16 bytes of channels at once


class ConvolutionBatchNormRelu:
    name = "convolution"

    def match(self, node: fx.Node) -> Match | None:
        convolution, norm = operation_of(node), next_operation(node)
        if convolution is None or convolution.name != "conv2d" or norm is None or norm.name != "batch_norm":
            return None
        x, given = tensor_of(convolution.arguments["input"]), norm.arguments
        settings = [convolution.arguments[name] for name in ("stride", "padding", "dilation", "groups")]
        if x is None or x.dim() != 4 or not are_constants(*settings, given["eps"]):
            return None
        if given["training"] is not False or given["running_mean"] is None or given["running_var"] is None:
            return None
        last, chain, residual = norm.node, [node, norm.node], None
        user = sole_user(last)
        added = _addition(user, last)
        types = {one.dtype for one in map(tensor_of, added or ()) if one is not None}
        if user is not None and added is not None and len(types) == 1:
            last, residual = user, added[1]
            chain.append(last)
        relu = next_operation(last)
        if relu is None or relu.activation != "relu" or any(map(is_differentiated, (*chain, relu.node))):
            return None
        if any(name_of(user) == "detach_" for user in relu.node.users):  # then nothing tells whether it had gradients
            return None
        arguments = {f"norm_{name}": given[name] for name in ("running_mean", "running_var", "weight", "bias", "eps")}
        parts = ["conv2d", "batch_norm", *(["add"] if residual is not None else []), "relu"]
        arguments |= {**convolution.arguments, "residual": residual, "parts": parts}
        return Match(self, (*chain, relu.node), arguments)

    def replace(self, graph: fx.Graph, match: Match) -> fx.Node:
        given, made = match.arguments, tensor_of(match.nodes[0])
        assert made is not None
        tensors = (given["input"], given["weight"], given["bias"])
        norm = tuple(given[f"norm_{name}"] for name in ("running_mean", "running_var", "weight", "bias"))
        options = {name: given[name] for name in ("residual", "stride", "padding", "dilation", "groups")}
        options |= {"eps": given["norm_eps"], "dtype": made.dtype}
        return with_dtype(graph, graph.call_function(conv_batch_norm_relu, (*tensors, *norm), options), match)

    def cost(self, match: Match) -> Cost:
        """Two kernels fold weight and bias; the convolution reads the new weight."""
        given = match.arguments
        moved = sum(map(size_of, (given["input"], given["residual"], match.nodes[-1])))
        return Cost(moved + 3 * size_of(given["weight"]), flops_of(match.nodes[0]), 3)

    def pays(self, match: Match) -> bool:
        """In channels-last layout, which cuDNN's fused convolutions are for, and for channels that they take."""
        weight, output = tensor_of(match.arguments["weight"]), tensor_of(match.nodes[-1])
        if weight is None or output is None or output.is_contiguous() or match.arguments["groups"] != 1:
            return False
        aligned = weight.shape[0] % CHANNEL_MULTIPLE == 0 and weight.shape[1] % CHANNEL_MULTIPLE == 0
        return aligned and output.is_contiguous(memory_format=torch.channels_last) and served(match.nodes[-1])


def _addition(node: fx.Node | None, source: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors of one shape that `node` adds, `source` first; None if it does something else, or changes another."""
    operation = operation_of(node) if node is not None else None
    if operation is None or operation.name != "add" or operation.arguments.get("alpha", 1) != 1:
        return None
    one, two = operation.arguments["input"], operation.arguments["other"]
    if two is source:
        one, two = two, one
    first, second, made = map(tensor_of, (one, two, node))
    if first is None or second is None or made is None or not first.shape == second.shape == made.shape:
        return None
    return (one, two) if two is not source and written_by(operation.node) in ([], [source]) else None
