"""The graphs that Dynamo captures of a function, without compiling them: what `explain` reads and decisions are keyed by."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn


@dataclass(frozen=True)
class Captured:
    """One graph of a call, with the sizes of that call in its nodes' metadata. A function without graph breaks has one."""

    graph: fx.Graph
    break_reason: str = ""  # why the program left the graph after it; empty for the last one


def capture_graphs(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Captured]:
    """Run `function` once, operation by operation, and return its graphs in the order in which they ran."""
    found: list[Captured] = []

    def record(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        reason = getattr(gm, "compile_subgraph_reason", None)
        found.append(Captured(gm.graph, _one_line(reason.reason) if reason is not None and reason.graph_break else ""))
        return gm.forward

    with without_log_breaks():
        torch.compile(function, backend=record, dynamic=False)(*args, **kwargs)
    return found


def without_log_breaks() -> contextlib.AbstractContextManager[None]:
    """Inside, Dynamo leaves out log messages instead of ending a graph at each of them, as in the losses of `transformers`."""
    messages = {getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error")}
    context: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(ignore_logger_methods=messages)
    return context


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """A function that calls `module` as `nn.Module.__call__` does. Dynamo skips frames of torch's own modules, but not it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return type(module)._call_impl(module, *args, **kwargs)

    return call


def _one_line(reason: object) -> str:
    return next((line.strip() for line in str(reason).splitlines() if line.strip()), "")
