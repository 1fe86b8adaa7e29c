"""Times a chain apart and fused on a CUDA device, once for its sizes.

What counts is the device's time, taken from CUDA graphs, where the device is what the model waits for, and the time a program
sees, launches included, where the device waits for the host.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from onelaunch.fuse.chains import Chain
from onelaunch.fuse.costs import Spec, Step
from onelaunch.fuse.put_back import buffers_put_back
from onelaunch.fuse.record import Found
from onelaunch.fuse.region import compiled, run_apart, watched_by
from onelaunch.fuse.tracing import Trace
from onelaunch.graph_times import graph_times
from onelaunch.measured_times import MeasuredTimes

TIMED_SOURCES = ("kernels", "nvrtc", "ops", "fuse/timing.py")  # a change of these makes the times on disk invalid
BURST_SECONDS = 2e-3  # of each sample
SAMPLES = 7
HOST_CALLS = 5
HOST_SHARE = 0.9  # of the time until the device is done, spent launching: the device waited


def measure(one: Found, steps: list[Step], device: torch.device, by_host: bool) -> tuple[float, float] | None:
    """Seconds apart and fused, measured once for a chain and its sizes; None for a chain that cannot be run by itself."""
    sizes = [f"{spec.shape}{spec.dtype}{spec.requires_grad}" for step in steps for spec in step.inputs]
    options = [f"{name}={value}" for step in steps for name, value in step.options.items()]
    key = " ".join(("host" if by_host else "device", one.chain.name, *sizes, *options))
    table = _table(device.index or 0)
    known = _as_times(table.entries.get(key))
    if known is None:
        try:
            apart_run, fused_run = contenders(one, steps, device)
        except LookupError:
            return None
        runs = {"apart": apart_run, "fused": fused_run}
        with torch.cuda.device(device), buffers_put_back(one.region.module):
            known = burst_times(runs) if by_host else device_times(runs)
        table.add(key, known)
    return known["apart"], known["fused"]


def _as_times(entry: Any) -> dict[str, float] | None:
    """An entry of the file, unless it is not what this version writes."""
    if not isinstance(entry, dict) or set(entry) != {"apart", "fused"}:
        return None
    return entry if all(isinstance(time, float) and 0 < time < math.inf for time in entry.values()) else None


def contenders(
    one: Found, steps: list[Step], device: torch.device
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The chain apart and fused, on values of its sizes: forward, and backward where the record has one."""
    graph, chain, outer = _cut_out(one.chain)
    cut = Trace(graph, one.region.module, {}, {})
    values = [_example(spec, device) for spec in _outer_specs(outer, one.chain, steps)]
    held = [
        p for operation in one.chain.operations if operation.module is not None for p in operation.module.parameters()
    ]
    leaves = [value for value in (*values, *held) if value.requires_grad] if steps[-1].output.requires_grad else []
    result = steps[-1].output
    dy = torch.ones(result.shape, dtype=result.dtype, device=device)
    apart_run, fused_run = (
        functools.partial(_once, compiled(cut, chains), one.region.module, values, leaves, dy)
        for chains in ([], [chain])
    )
    return apart_run, fused_run


def _cut_out(chain: Chain) -> tuple[fx.Graph, Chain, list[fx.Node]]:
    """The chain as a graph of its own, with what it reads as placeholders."""
    outer = list(dict.fromkeys(arg for node in chain.nodes for arg in node.all_input_nodes if arg not in chain.nodes))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in outer:
        copies[node] = graph.get_attr(str(node.target)) if node.op == "get_attr" else graph.placeholder(node.name)
    for node in chain.nodes:
        copies[node] = graph.node_copy(node, lambda arg: copies[arg])
    graph.output(copies[chain.nodes[-1]])
    moved = [
        replace(op, arguments=fx.node.map_arg(op.arguments, lambda arg: copies[arg])) for op in chain.operations
    ]  # fmt: skip
    return graph, Chain([copies[node] for node in chain.nodes], moved), [n for n in outer if n.op != "get_attr"]


def _outer_specs(outer: list[fx.Node], chain: Chain, steps: list[Step]) -> list[Spec]:
    """Sizes of the placeholders: the chain's input, a function's weights, or a loss's target."""
    specs = []
    for node in outer:
        if node is chain.operations[0].input:
            specs.append(steps[0].inputs[0])
        elif node is chain.operations[-1].arguments.get("target"):
            logits = steps[0].inputs[0].shape
            specs.append(Spec(logits[:1] + logits[2:] if len(logits) > 1 else (), torch.int64, False))
        else:
            names = [name for name in ("weight", "bias") if chain.operations[0].arguments.get(name) is node]
            if steps[0].role != "linear" or not names:
                raise LookupError("a value of unknown size")
            specs.append(steps[0].inputs[1 if names[0] == "weight" else 2])
    return specs


def _example(spec: Spec, device: torch.device) -> torch.Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return torch.randn(spec.shape, dtype=spec.dtype, device=device).requires_grad_(spec.requires_grad)


def _once(
    run: Callable[..., Any], module: nn.Module, values: list[torch.Tensor], leaves: list[torch.Tensor], dy: torch.Tensor
) -> object:
    """A forward, and a backward to `leaves` if there are any."""
    with torch.set_grad_enabled(bool(leaves)):
        out = run(module, *values)
        return torch.autograd.grad(out, leaves, dy, allow_unused=True) if leaves else out


def device_times(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds the device takes for each, as CUDA graphs; in bursts where one cannot be captured."""
    for run in runs.values():
        for _ in range(3):
            run()  # compiles, chooses implementations
    try:
        return graph_times({name: _numbered(run) for name, run in runs.items()})
    except RuntimeError:  # a momentum of None asks the device for a number, say
        return burst_times(runs)


def _numbered(run: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: run()


def burst_times(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds a program sees for each, launches by the host included."""
    repeats: dict[str, int] = {}
    for name, run in runs.items():
        for _ in range(3):
            run()  # compiles, chooses implementations
        repeats[name] = max(2, min(500, int(BURST_SECONDS / max(1e-6, _burst(run, 4)))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(SAMPLES):
        for name, run in runs.items():
            samples[name].append(_burst(run, repeats[name]))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def _burst(run: Callable[[], object], calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def waits_for_host(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether the device waits for the host to launch when this model runs, with nothing fused."""
    generators = torch.random.fork_rng(devices=[torch.cuda.current_device()])
    with buffers_put_back(model), generators, watched_by(run_apart):
        for _ in range(2):
            _call_and_return(model, inputs)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            _call_and_return(model, inputs)
        launched = time.perf_counter() - begin
        torch.cuda.synchronize()
        return launched > HOST_SHARE * (time.perf_counter() - begin)


def _call_and_return(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A forward, and a backward in training mode that leaves no gradients behind."""
    copies = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    with torch.set_grad_enabled(model.training):
        results = [out for out in tree_leaves(model(*copies)) if isinstance(out, torch.Tensor) and out.requires_grad]
        leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if results and leaves:
            torch.autograd.grad(results, leaves, [torch.ones_like(out) for out in results], allow_unused=True)


@functools.cache
def _table(device: int) -> MeasuredTimes:
    return MeasuredTimes.of_device(device, "fuse", *TIMED_SOURCES)
