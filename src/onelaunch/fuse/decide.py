"""Which patterns a model uses: the whole model is timed as it will run, and the fastest candidate is kept.

Candidates are the model uncompiled, compiled by Inductor alone and compiled with all patterns that match; if these do not win
together, also with each kind of pattern alone. In evaluation, without gradients, the compiled ones are also recorded as a CUDA
graph. Compiling takes most of the time, so no candidate is compiled that is not needed. A kernel that wins by itself
may lose inside a compiled model, where it keeps Inductor from fusing its neighbours, so single kernels are not compared. The
decision is kept on disk by graph, shapes, chip, versions and sources.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from onelaunch.capture.dynamo import compile_by
from onelaunch.capture.named_inputs import keeping_names
from onelaunch.format import format_seconds
from onelaunch.fuse.backend import onelaunch
from onelaunch.fuse.captured import Captured, capture_graphs
from onelaunch.fuse.patterns import BY_NAME, find_matches, pays, pays_without_graph
from onelaunch.measured_times import MeasuredTimes
from onelaunch.program_times import program_times
from onelaunch.trial_runs import copied, device_of, restored, run_once, trial_mode

log = logging.getLogger("onelaunch")
Patterns = tuple[str, ...]
Function = Callable[..., Any]
ALL: Patterns = tuple(BY_NAME)
WITH_GRADIENTS: Patterns = tuple(name for name in ALL if name != "convolution")  # which is for evaluation alone
UNCOMPILED, COMPILED, RECORDED = "uncompiled", "compiled", " as a CUDA graph"
LEAD = 1.01  # by which a pattern must win: timings of one model differ by 0.3 to 2.4 % from run to run on an H200


class Choice(NamedTuple):
    """How a model runs: with which patterns (() for Inductor alone, None for uncompiled), and whether as a CUDA graph."""

    patterns: Patterns | None = ALL
    recorded: bool = False  # where results have no gradients


UNMEASURED = Choice()


def compiled(
    function: Function, patterns: Patterns | None, recorded: bool = False, *, captured: bool = False
) -> Function:
    """`function` compiled with these patterns; `function` itself for patterns None.

    captured: the caller records its calls in a CUDA graph.
    """
    if patterns is None:
        return function
    backend = functools.partial(onelaunch, patterns=patterns, recorded=recorded, captured=captured)
    return compile_by(keeping_names(backend) if captured else backend, function)


def decide(
    function: Function, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Choice, Function]:
    """The fastest choice for these inputs, and the function compiled so.

    Nothing is measured unless the inputs are on a CUDA device: our kernels are for CUDA, and elsewhere no pattern pays.
    """
    device = device_of(args, kwargs)
    if device is None or device.type != "cuda":
        return UNMEASURED, compiled(function, *UNMEASURED)
    args, kwargs = copied((args, kwargs))
    with restored(model), trial_mode(model, args, kwargs):
        captured = capture_graphs(function, args, kwargs)
        key, forward_only = graph_key(model, captured), not torch.is_grad_enabled()
    wanted = pays if forward_only else pays_without_graph
    kinds = sorted({match.pattern.name for one in captured for match in find_matches(one.graph, wanted)})
    candidates = candidates_of(kinds, forward_only)
    times = times_of(device)
    found = {name: seconds for name, seconds in times.times(key).items() if name in candidates}
    functions = {name: compiled(function, *choice) for name, choice in candidates.items()}
    while missing := still_needed(candidates, found, kinds):
        with restored(model), torch.cuda.device(device), trial_mode(model, args, kwargs):
            names = [name for name in candidates if name in found or name in missing]
            found = program_times(
                {name: functools.partial(run_once, functions[name], model, args, kwargs) for name in names}
            )
        times.add(key, found)
    best = fastest(found)
    said = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in found.items())
    log.info("%s: %s is fastest (%s)", type(model).__name__, best, said)
    return candidates[best], functions[best]


def still_needed(candidates: dict[str, Choice], found: dict[str, float], kinds: list[str]) -> list[str]:
    """The candidates to measure next: those with one of several patterns only if all patterns together are not fastest."""
    together = [name for name, choice in candidates.items() if len(choice.patterns or ()) in {0, len(kinds)}]
    if missing := [name for name in together if name not in found]:
        return missing
    won = len(candidates[fastest({name: found[name] for name in together})].patterns or ()) == len(kinds)
    return [] if won else [name for name in candidates if name not in found]


def known_seconds(model: nn.Module, captured: list[Captured], device: torch.device) -> dict[str, float]:
    """Seconds per call of each candidate, if `fuse` has measured this model with these inputs on a CUDA device before."""
    return times_of(device).times(graph_key(model, captured)) if device.type == "cuda" else {}


def times_of(device: torch.device) -> MeasuredTimes:
    return MeasuredTimes.of_device(device.index or 0, "fuse", "fuse", "kernels", "ops")


def candidates_of(kinds: list[str], forward_only: bool) -> dict[str, Choice]:
    """How each candidate runs, by its name. Where a CUDA graph is possible, patterns are tried inside one alone."""
    sets: dict[str, Patterns] = {" + ".join(kinds): tuple(kinds)} if len(kinds) > 1 else {}
    sets |= {kind: (kind,) for kind in kinds}
    if forward_only:
        recorded = {name + RECORDED: Choice(patterns, True) for name, patterns in ({COMPILED: ()} | sets).items()}
    else:
        recorded = {name: Choice(patterns) for name, patterns in sets.items()}
    return {UNCOMPILED: Choice(None), COMPILED: Choice(())} | recorded


def fastest(times: dict[str, float]) -> str:
    """The name of the fastest candidate. Patterns must win clearly over Inductor alone, and so must a CUDA graph."""
    best = min(times, key=times.__getitem__)
    plain = (name for name in (COMPILED, COMPILED + RECORDED) if times.get(name, float("inf")) <= LEAD * times[best])
    return best if best == UNCOMPILED else next(plain, best)


def chosen_patterns(times: dict[str, float]) -> Patterns:
    """The patterns of the fastest candidate; none for an uncompiled one."""
    return patterns_in(fastest(times))


def patterns_in(candidate: str) -> Patterns:
    """The patterns in the name of a candidate."""
    return tuple(name for name in candidate.removesuffix(RECORDED).split(" + ") if name in BY_NAME)


def graph_key(model: nn.Module, captured: list[Captured]) -> str:
    """Equal for models that would be compiled alike: same operations, shapes, types and mode."""
    return graphs_key([one.graph for one in captured], f"{model.training} {torch.is_grad_enabled()}")


def graphs_key(graphs: Iterable[fx.Graph], about: str) -> str:
    digest, waiting = hashlib.sha256(about.encode()), [*graphs]
    while waiting:
        graph = waiting.pop(0)
        for node in graph.nodes:
            value = node.meta.get("example_value")
            shape = (tuple(value.shape), value.dtype, value.stride()) if isinstance(value, torch.Tensor) else ""
            line = f"{node.op} {_name_of(node)} {node.args} {node.kwargs} {shape}\n"
            digest.update(re.sub(r"0x[0-9a-f]+", "", line).encode())  # an address differs from process to process
            inner = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):  # the body of a checkpoint
                waiting.append(inner.graph)
    return digest.hexdigest()


def _name_of(node: fx.Node) -> str:
    target = node.target
    return target if isinstance(target, str) else f"{target.__module__}.{getattr(target, '__qualname__', target)}"
