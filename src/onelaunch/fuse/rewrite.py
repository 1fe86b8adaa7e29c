"""Puts one call in the place of each chain of a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from onelaunch.fuse import calls
from onelaunch.fuse.chains import Chain
from onelaunch.fuse.operations import Operation
from onelaunch.fuse.spelled import activated


def rewrite(graph: fx.Graph, chains: Iterable[Chain]) -> None:
    """Changes `graph`, which must be the one the chains were found in."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    # From the end: what a chain says of the values it takes, all made before its last node, is true until they are replaced.
    for chain in sorted(chains, key=lambda chain: order[chain.nodes[-1]], reverse=True):
        with graph.inserting_before(chain.place):
            fused = _call(graph, chain)
        fused.meta = {"owner": chain.owner, "chain": chain.name}
        chain.nodes[-1].replace_all_uses_with(fused)
        for node in reversed(chain.nodes):
            graph.erase_node(node)


def _call(graph: fx.Graph, chain: Chain) -> fx.Node:
    by_role: dict[str, Operation] = {operation.role: operation for operation in chain.operations}
    first = chain.operations[0]
    activation = by_role["activation"].name if "activation" in by_role else None
    dropout = by_role["dropout"].dropped if "dropout" in by_role else 0.0
    x = first.input
    match first.role:
        case "linear" if "batch_norm" in by_role:
            modules = [graph.get_attr(by_role[role].path) for role in ("linear", "batch_norm")]
            return graph.call_function(calls.folded_linear, (x, *modules, activation))
        case "linear":
            weights = [_tensor(graph, first, name) for name in ("weight", "bias")]
            return graph.call_function(calls.linear, (x, *weights, activation, dropout))
        case "batch_norm" if first.module is not None:
            return graph.call_function(calls.batch_norm, (x, graph.get_attr(first.path), activation, dropout))
        case "batch_norm":
            names = ("running_mean", "running_var", "weight", "bias")
            options = (first.option("training", False), first.option("momentum", 0.1), first.option("eps", 1e-5))
            tensors = [_tensor(graph, first, name) for name in names]
            return graph.call_function(calls.batch_norm_with, (x, *tensors, *options, activation, dropout))
        case "activation" if first.spelled:
            return graph.call_function(activated, (x, first.name, graph.get_attr(first.path)))
        case "activation":
            return graph.call_function(calls.relu_dropout, (x, dropout))
        case _:
            return _loss(graph, chain.operations)


def _tensor(graph: fx.Graph, operation: Operation, name: str) -> Any:
    """A tensor of the operation: looked up in the module at each call, since it may be moved or replaced."""
    if operation.module is None:
        return operation.arguments.get(name)
    return None if getattr(operation.module, name) is None else graph.get_attr(f"{operation.path}.{name}")


def _loss(graph: fx.Graph, operations: list[Operation]) -> fx.Node:
    loss = operations[-1]
    target = loss.arguments["target"]
    common = (loss.option("ignore_index", -100), loss.option("reduction", "mean"))
    if loss.role == "cross_entropy":
        smoothing = loss.option("label_smoothing", 0.0)
        return graph.call_function(calls.cross_entropy, (loss.input, target, smoothing, *common))
    dim = operations[0].option("dim")
    return graph.call_function(calls.nll_of_log_softmax, (operations[0].input, target, dim, *common))
