"""The graphs that Dynamo captures of a function, without compiling them: what `explain` reads and decisions are keyed by."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from onelaunch.capture.dynamo import break_reason, compile_by, plain_break, without_dynamo_warnings, without_log_breaks
from onelaunch.fuse.graph import is_checkpointed_block

CHECKPOINTED = "onelaunch_checkpointed"  # the key of an operation's metadata


@dataclass(frozen=True)
class Captured:
    """One graph of a call, with the sizes of that call in its nodes' metadata. A function without graph breaks has one."""

    graph: fx.Graph
    break_reason: str = ""  # why and where the program left the graph after it; empty for the last one
    parameters: frozenset[int] = frozenset()  # those that it uses, by their ids
    left_out: str = ""  # of the last one: why parts of the program may be in no graph
    loss: fx.Node | None = None  # of the last one: the loss, if the program returns one among other things


def capture_graphs(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Captured]:
    """Run `function` once, operation by operation, and return its graphs in the order in which they ran.

    Where Dynamo captures nothing, the only graph is empty and has the reason.
    """
    found: list[Captured] = []
    latest: list[Any] = []  # the graph that ran last, and its results
    breaks = torch._dynamo.utils.counters["graph_break"]
    before = dict(breaks)

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        reason = getattr(gm, "compile_subgraph_reason", None)
        why = break_reason(reason) if reason is not None and reason.graph_break else ""
        found.append(
            Captured(gm.graph, why, frozenset(id(one) for one in example_inputs if isinstance(one, nn.Parameter)))
        )

        def forward(*args: Any) -> Any:
            latest[:] = [gm.graph, *(results := gm.forward(*args))]
            return results

        return forward

    with without_log_breaks(), without_dynamo_warnings():
        output = compile_by(record, function, dynamic=False)(*args, **kwargs)
    messages = [message for message, count in breaks.items() if count > before.get(message, 0)]
    if not found:
        reason = plain_break(messages[0]) if messages else "it has no operations of PyTorch"
        return [Captured(fx.Graph(), reason)]
    said = " ".join(one.break_reason for one in found)
    reasons = sorted(map(plain_break, messages), key=lambda reason: reason in said)  # first those that no graph has
    loss = _loss_among(output, *latest) if latest and latest[0] is found[-1].graph else None
    return [*found[:-1], replace(found[-1], left_out=reasons[0] if reasons else "", loss=loss)]


def _loss_among(output: Any, graph: fx.Graph, *results: Any) -> fx.Node | None:
    """Which of the graph's results, if there are several, is the loss within what a model returned."""
    loss = None
    with contextlib.suppress(Exception):  # a property of a user's class may raise anything
        loss = loss_in(output)
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad or len(results) < 2:
        return None
    nodes = graph.output_node().args[0]
    return next((node for node, result in zip(nodes, results, strict=True) if result is loss), None)  # type: ignore[arg-type]


def uncompiled_call(module: nn.Module, *, loss_alone: bool = False) -> Callable[..., Any]:
    """A function that calls `module` as `nn.Module.__call__` does. Dynamo skips frames of torch's own modules, but not it.

    loss_alone: of a result that has a loss, it returns only that, as `train_step` does.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return type(module)._call_impl(module, *args, **kwargs)

    def call_for_loss(*args: Any, **kwargs: Any) -> Any:
        output = type(module)._call_impl(module, *args, **kwargs)
        loss = loss_in(output)
        return output if loss is None else loss

    return call_for_loss if loss_alone else call


def loss_in(output: Any) -> Any:
    """The loss that a model has returned among other things; None if it has none."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def with_blocks_inlined(graph: fx.Graph) -> fx.Graph:
    """The graph with the operations of checkpointed blocks in their places, each with `CHECKPOINTED` in its metadata."""
    if not any(map(is_checkpointed_block, graph.nodes)):
        return graph
    made, values = fx.Graph(graph.owning_module), dict[fx.Node, Any]()
    for node in graph.nodes:
        if is_checkpointed_block(node):
            body = with_blocks_inlined(getattr(graph.owning_module, node.args[0].target).graph)
            inner = dict(zip(body.find_nodes(op="placeholder"), (values[one] for one in node.args[1:]), strict=True))
            before = set(made.nodes)
            values[node] = made.graph_copy(body, inner)
            for one in set(made.nodes) - before:
                one.meta[CHECKPOINTED] = True
        elif node.target is operator.getitem and isinstance(values.get(node.args[0]), tuple):
            values[node] = values[node.args[0]][node.args[1]]
        else:
            values[node] = made.node_copy(node, values.__getitem__)
    return made
