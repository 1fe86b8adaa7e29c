"""The kernels that Inductor made of a model: read from its scheduler while it compiles, and timed by the profiler on CUDA."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from onelaunch.capture.dynamo import compile_by
from onelaunch.fuse.backend import onelaunch
from onelaunch.fuse.explanation import INDUCTOR, LIBRARY, OURS
from onelaunch.fuse.patterns import REPLACES
from onelaunch.profile_times import operation_times


@dataclass
class Kernel:
    """One launch, or one call of a library or of an op of ours."""

    graph: int  # the number of the captured graph that it belongs to
    runs: str  # OURS, INDUCTOR or LIBRARY
    backward: bool
    sources: tuple[str, ...]  # names of the captured operations that it computes, or whose gradients
    seconds: float | None = None  # on the device, measured


def read_kernels(
    function: Callable[..., Any], run: Callable[[Callable[..., Any]], None], patterns: tuple[str, ...],
    in_graph: bool, on_cuda: bool,
) -> list[Kernel]:  # fmt: skip
    """The kernels in the order in which they are launched. `run` calls a function as the model will be called.

    in_graph: with the patterns that are used inside a CUDA graph.
    """
    found: list[Kernel] = []
    numbers = itertools.count()

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        number = next(numbers)

        def record(nodes: list[Any]) -> list[Any]:
            operations = _operations(gm.graph)
            found.extend(kernel for node in nodes if (kernel := _kernel(node, number, operations)) is not None)
            return nodes

        options = {"_post_fusion_custom_pass": record, "fx_graph_cache": False}  # a cached graph is not scheduled again
        return onelaunch(gm, example_inputs, options=options, patterns=patterns, captured=in_graph)

    with importlib.import_module("torch._functorch.config").patch(enable_autograd_cache=False):
        compiled = compile_by(backend, function, dynamic=False)
        run(compiled)
        times = operation_times(lambda: run(compiled)) if on_cuda else []
    if len(times) == len(found):
        for kernel, seconds in zip(found, times, strict=True):
            kernel.seconds = seconds
    return found


def _operations(graph: fx.Graph) -> dict[str, tuple[tuple[str, ...], bool]]:
    """By each name that Inductor may know a node by: the captured operations it stands for, and whether an op of ours does."""
    found: dict[str, tuple[tuple[str, ...], bool]] = {}
    for node in graph.nodes:
        entry = tuple(node.meta.get(REPLACES, [node.name])), REPLACES in node.meta
        stack = node.meta.get("source_fn_stack")
        found |= {node.name: entry} | ({stack[-1][0]: entry} if stack else {})
    return found


def _kernel(node: Any, number: int, operations: dict[str, tuple[tuple[str, ...], bool]]) -> Kernel | None:
    """What a node of Inductor's scheduler is launched as; None where it launches nothing."""
    from torch._inductor import ir
    from torch._inductor.utils import aggregate_origins
    from torch._inductor.virtualized import V

    parts = [part for part in node.get_nodes() if part.node is not None]
    if not parts or isinstance(parts[0].node, ir.MultiOutput) or type(node).__name__ == "NopKernelSchedulerNode":
        return None
    runs = INDUCTOR
    if node.is_extern():
        runs = OURS if str(getattr(parts[0].node, "op_overload", "")).startswith("onelaunch.") else LIBRARY
    entries = [operations[name] for name in map(_source, aggregate_origins(parts)) if name in operations]
    # A value that an op of ours reads or writes counts as its origin too, and the op as the value's.
    entries = [entry for entry in entries if entry[1] == (runs == OURS)] or entries
    sources = tuple(dict.fromkeys(itertools.chain(*(entry[0] for entry in entries))))
    return Kernel(number, runs, bool(V.graph.is_backward), sources)


def _source(origin: fx.Node) -> str | None:
    """The operation of the captured graph that a node of the graph that Inductor compiled comes from, forward or backward."""
    if origin.op != "call_function":
        return None
    if origin.meta.get("fwd_source_fn_stack"):
        return str(origin.meta["fwd_source_fn_stack"][-1][0])
    if origin.meta.get("from_node"):
        return str(origin.meta["from_node"][0].name)
    stack = origin.meta.get("source_fn_stack")
    return str(stack[-1][0]) if stack else None
