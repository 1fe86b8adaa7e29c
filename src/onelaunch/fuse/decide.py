"""Whether fusing a chain pays: measured on a CUDA device, once for a chain and its sizes; predicted elsewhere."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from onelaunch.errors import OnelaunchError
from onelaunch.files import cache_folder
from onelaunch.fuse.chains import Chain
from onelaunch.fuse.costs import NOTHING, Spec, Step, Work, fused
from onelaunch.fuse.placing import fusion_of, in_mode, make_plans
from onelaunch.fuse.record import Found, Record, record
from onelaunch.fuse.region import chain_key, compiled
from onelaunch.fuse.roofline import DeviceModel, device_model
from onelaunch.fuse.tracing import Trace
from onelaunch.fuse.verdict import forced
from onelaunch.ops import linear_choice

BURST_SECONDS = 2e-3  # of each sample
SAMPLES = 7


@dataclass(frozen=True)
class Decision:
    """Seconds are those of one forward, and of one backward too in training mode."""

    fused: bool
    reason: str
    before: Work
    after: Work
    predicted: tuple[float, float]  # apart, fused
    measured: tuple[float, float] | None


def decide(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Writes the verdicts for a fused model at the sizes of `inputs`, for both modes, and makes its plans anew."""
    fusion = fusion_of(model)
    assert fusion is not None
    current = model.training
    for mode in (current, not current):
        with in_mode(model, mode):
            try:
                run = record(model, inputs)
            except OnelaunchError:
                if mode is current:
                    raise
                continue  # these inputs cannot be used in the other mode: one row has no batch statistics, say
        for one in run.chains:
            key = chain_key(one.chain, one.region.path, one.training)
            decision = decision_on(one, run, device_of(model, inputs))
            if decision is not None:
                fusion.verdicts[key] = None if decision.fused else decision.reason
    make_plans(model, (False,) if fusion.options.eval_only else (True, False))


def decision_on(one: Found, run: Record, device: torch.device, roof: DeviceModel | None = None) -> Decision | None:
    """The decision on a chain that can be fused. `roof`: predict for that device, whatever the machine has."""
    steps = [run.steps[position] for position in one.steps]
    if one.chain.reason is not None or len(steps) != len(one.chain.nodes):
        return None
    measured = measure(one, steps, device) if device.type == "cuda" and roof is None else None
    return judge(steps, roof or device_model(device), measured)


def judge(steps: list[Step], roof: DeviceModel, measured: tuple[float, float] | None = None) -> Decision:
    before = Work(sum((step.forward for step in steps), NOTHING), sum((step.backward for step in steps), NOTHING))
    after = fused(steps, extra_pass=measured is not None and _takes_extra_pass(steps))
    predicted = sum(seconds_apart(roof, step) for step in steps), seconds_of(roof, after, steps[0].output.dtype)
    apart_seconds, fused_seconds = measured or predicted
    overruled = forced()
    pays = fused_seconds < apart_seconds if overruled is None else overruled
    how = "measured" if measured else "predicted"
    if pays:
        saved = 1 - fused_seconds / apart_seconds if apart_seconds else 0.0
        reason = f"saves {saved:.0%} of its time ({how})"
    else:
        reason = f"does not pay: {_time(fused_seconds)} fused, {_time(apart_seconds)} apart ({how})"
    return Decision(pays, reason, before, after, predicted, measured)


def seconds_apart(roof: DeviceModel, step: Step) -> float:
    return seconds_of(roof, Work(step.forward, step.backward), step.output.dtype)


def seconds_of(roof: DeviceModel, work: Work, dtype: torch.dtype) -> float:
    """Forward and backward are bound apart: a product's time must not hide behind a pass over memory."""
    return roof.seconds(work.forward, dtype) + roof.seconds(work.backward, dtype)


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def device_of(model: nn.Module, inputs: tuple[Any, ...]) -> torch.device:
    for tensor in (*(x for x in inputs if isinstance(x, torch.Tensor)), *model.parameters()):
        return tensor.device
    return torch.device("cpu")


def _takes_extra_pass(steps: list[Step]) -> bool:
    """Whether `ops.linear` was measured to be fastest as cuBLAS and a pass for this chain."""
    if steps[0].role != "linear":
        return False
    x, weight = steps[0].inputs[:2]
    n, k = weight.shape
    like = (x.dtype, linear_choice.shape_class(max(1, x.numel // k)), n, k)
    chosen = [choice.name for key, choice in linear_choice._chosen.items() if key[1:5] == like]
    return bool(chosen) and chosen[-1] == linear_choice.LIBRARY.name


def measure(one: Found, steps: list[Step], device: torch.device) -> tuple[float, float]:
    """Seconds apart and fused; the time a program sees, launches by the host included."""
    key = " ".join(
        (one.chain.name, *(f"{tuple(spec.shape)}{spec.dtype}{spec.requires_grad}" for step in steps for spec in step.inputs),
         *(f"{name}={value}" for step in steps for name, value in step.options.items()))
    )  # fmt: skip
    table = _table(device.index or 0)
    known = table.choices.get(key)
    if known is None:
        apart_run, fused_run = contenders(one, steps, device)
        with _buffers_put_back(one.region.module):
            known = time_in_turns({"apart": apart_run, "fused": fused_run})
        table.add(key, known)
    return known["apart"], known["fused"]


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
    apart_run, fused_run = (
        functools.partial(_once, compiled(cut, chains), one.region.module, values, leaves) for chains in ([], [chain])
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
                raise NotImplementedError("a value of unknown size")
            specs.append(steps[0].inputs[1 if names[0] == "weight" else 2])
    return specs


def _example(spec: Spec, device: torch.device) -> torch.Tensor:
    if not spec.dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    return torch.randn(spec.shape, dtype=spec.dtype, device=device).requires_grad_(spec.requires_grad)


def _once(run: Callable[..., Any], module: nn.Module, values: list[torch.Tensor], leaves: list[torch.Tensor]) -> object:
    """A forward, and a backward to `leaves` if there are any."""
    with torch.set_grad_enabled(bool(leaves)):
        out = run(module, *values)
        return torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True) if leaves else out


@contextmanager
def _buffers_put_back(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def time_in_turns(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of a call of each on the current CUDA device."""
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


@functools.cache
def _table(device: int) -> linear_choice.Table:
    chip = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
    return linear_choice.Table(cache_folder("fuse") / f"chains-{chip}-torch{torch.__version__}.json")
