"""The graphs that Dynamo captures of a function, without compiling them: what `explain` reads and decisions are keyed by."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from onelaunch.errors import first_line
from onelaunch.fuse.graph import is_checkpointed_block
from onelaunch.fuse.substitutes import substitute
from onelaunch.loggers import logging_from

# What Dynamo says where it ends a graph, as a regular expression, and the same in plain words.
BREAKS = (
    (r"Tensor\.item\(\)|Tensor\.tolist|Tensor\.numpy", "a tensor's value is read on the host"),
    (r"generic_jump|[Dd]ata-dependent", "the program branches on a tensor's value"),
    (r"[Dd]ynamic shape operator|nonzero|[Dd]ata dependent operator", "the size of a result depends on values"),
    (r"builtin operator `(\w+)`", r"the program calls `\1`"),
    (r"torch\.compiler\.disable|_dynamo\.disable", "a function is excluded by torch.compiler.disable"),
    (r"graph_break\(", "the program asks for a break"),
    (r"\b(RNN|LSTM|GRU)\b", "recurrent layers are not captured"),
    (r"autograd\.grad", "the program computes gradients itself"),
    (r"requires_grad", "the program sets requires_grad of a tensor"),
    (r"returned non-Tensor", "a function of PyTorch returns something else than tensors"),
    (r"step_unsupported", "Dynamo cannot follow the program here"),
)
CHECKPOINTED = "onelaunch_checkpointed"  # the key of an operation's metadata
WARNING_ONCE = "warning_once"  # a method that `transformers` adds to `logging.Logger`
_numbers = itertools.count()


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
        why = _break_reason(reason) if reason is not None and reason.graph_break else ""
        found.append(
            Captured(gm.graph, why, frozenset(id(one) for one in example_inputs if isinstance(one, nn.Parameter)))
        )

        def forward(*args: Any) -> Any:
            latest[:] = [gm.graph, *(results := gm.forward(*args))]
            return results

        return forward

    with without_log_breaks(), _without_dynamo_warnings():
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


def compile_by(backend: Callable[..., Any], function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` of a function by itself: what it captures depends on no other function that was compiled before."""
    substitute()
    return torch.compile(own_code(function), backend=backend, **options)


def own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with a code object and a name of its own.

    Dynamo counts recompilations per code object and stops after 8, so functions of different models must not share one. Sizes
    that it has seen change are kept by name: another model's batch size must not make this model's shapes dynamic.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(own_code(function.__func__), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_numbers)}")
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextlib.contextmanager
def without_log_breaks() -> Iterator[None]:
    """Inside, Dynamo leaves out the warnings that `transformers` logs, as in its losses, instead of ending a graph at each.

    It ends a graph at other warnings, which are logged. An error that is also raised, such as one of shapes, is not logged.
    """
    # PyTorch 2.11 sorts the set, so it may hold one function; it also logs that it cannot write the set as JSON.
    if hasattr(torch._dynamo.config, "ignore_logging_functions"):
        messages = _warnings_of_transformers(len(logging.Logger.manager.loggerDict))
    else:
        messages = {vars(logging.Logger)[WARNING_ONCE]} if WARNING_ONCE in vars(logging.Logger) else set()
    loggers = [logging.getLogger(name) for name in ("torch._dynamo.metrics_context", "torch._subclasses.fake_tensor")]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with torch._dynamo.config.patch(ignore_logger_methods=messages):
            yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


@functools.lru_cache(maxsize=1)
def _warnings_of_transformers(number: int) -> set[Callable[..., Any]]:
    """The methods of its loggers that warn; looked up anew when the `number` of all loggers has changed."""
    found = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict if name.startswith("transformers")]
    return {getattr(log, name) for log in found for name in ("warning", WARNING_ONCE) if hasattr(log, name)}


@contextlib.contextmanager
def _without_dynamo_warnings() -> Iterator[None]:
    """Dynamo warns of graph breaks in a dozen lines; the caller tells of them in one."""
    with logging_from(logging.ERROR, "torch._dynamo"), warnings.catch_warnings():
        # It looks at the gradients of the values that one graph hands to the next.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


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


def _break_reason(reason: Any) -> str:
    """`a tensor's value is read on the host (model.py:14)`"""
    frame = reason.user_stack[-1] if reason.user_stack else None
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame is not None else ""
    return plain_break(str(reason.reason)) + place


def plain_break(message: str) -> str:
    """One plain line for Dynamo's message about a graph break: an entry of BREAKS, or else the message's first line."""
    for expression, words in BREAKS:
        if found := re.search(expression, message):
            return found.expand(words)
    return first_line(message) or "no reason is given"
