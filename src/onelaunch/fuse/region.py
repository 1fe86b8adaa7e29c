"""The forward of a module in which chains are fused: traced once for each way it is called, guarded, rewritten.

A region is the instance attribute `forward` of a module. The class stays what it is, and so do hooks, `state_dict`, `repr`,
pickling and `copy.deepcopy`. Where a trace cannot be vouched for, the class's own forward runs.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as module_hooks

from onelaunch.fuse.arguments import Arguments, inputs_of
from onelaunch.fuse.chains import Chain, find_chains
from onelaunch.fuse.guard import Guard
from onelaunch.fuse.operations import is_known
from onelaunch.fuse.own_thread import ONE_AT_A_TIME
from onelaunch.fuse.rewrite import rewrite
from onelaunch.fuse.tracing import RefusedError, StandsForClass, Trace, trace
from onelaunch.fuse.twin import sealed
from onelaunch.fuse.verdict import without_sizes

log = logging.getLogger("onelaunch")
MOST_PLANS = 16  # of one region; the one that was not used for longest makes room for the next
# Calls alike that a region with so many plans gets before it makes another: a trace takes as long as some tens of calls, and
# constants that never repeat (a growing position, an annealed temperature) are not worth one.
WORTH_A_PLAN = 50
Watcher = Callable[["Region", "Plan", tuple[Any, ...], dict[str, Any]], Any]
_clock = itertools.count(1)
watcher: Watcher | None = None  # what runs the plans of all regions, for a while


@dataclass(frozen=True)
class Options:
    eval_only: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def excluded(self, paths: list[str]) -> str | None:
        """Why a chain of modules with these paths is not to be fused; None when it may be."""
        if self.only and not all(_inside(path, self.only) for path in paths):
            return "not named in only"
        if any(_inside(path, self.skip) for path in paths):
            return "named in skip"
        return None


def _inside(path: str, names: tuple[str, ...]) -> bool:
    return any(not name or path == name or path.startswith(f"{name}.") for name in names)  # "" is the whole model


@dataclass
class Fusion:
    """What all regions of one fused model share. `verdicts` holds, by mode and chain, why a chain is not worth it."""

    options: Options
    sized: bool = False  # whether example inputs decide; without them, `without_sizes` does
    verdicts: dict[tuple[bool, str], str | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # why something was not fused or not traced
    told: bool = False  # that calls run unfused for want of a plan


@dataclass
class Plan:
    """One way a region is called: its graph, its chains, and the function that runs it (None: the class's own forward)."""

    arguments: Arguments
    guard: Guard
    chains: list[Chain] = field(default_factory=list)
    trace: Trace | None = None
    refusal: str | None = None  # why there is no trace
    run: Callable[..., Any] | None = None
    used: int = 0  # when, by `_clock`: at first, and at each call of a region with as many plans as it may have

    @property
    def fused(self) -> list[Chain]:
        return [chain for chain in self.chains if chain.reason is None]


@dataclass
class Missed:
    """A kind of call that has no plan, and how often modules were then as they were at the last one."""

    arguments: Arguments
    guard: Guard | None = None
    times: int = 0


class Region(StandsForClass):
    def __init__(self, module: nn.Module, path: str, shared: frozenset[str], fusion: Fusion) -> None:
        self.module = module
        self.path = path  # in the fused model
        self.shared = shared  # paths below the module of those that are registered more than once
        self.fusion = fusion
        self.example: Arguments | None = None  # the kind of call that example inputs make, of the model itself
        self.plans: list[Plan] = []
        self.missed: deque[Missed] = deque(maxlen=4)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plan(args, kwargs)
        if watcher is not None and plan is not None and plan.trace is not None:
            return watcher(self, plan, args, kwargs)
        if plan is None or plan.run is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return plan.run(self.module, *inputs_of(args, kwargs))

    @property
    def __signature__(self) -> inspect.Signature:
        """Of the forward that is replaced: libraries ask for it to choose what to pass."""
        signature = inspect.signature(type(self.module).forward)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    @property
    def __code__(self) -> Any:
        return type(self.module).forward.__code__  # torch.export names the source file by it

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        """The plan for a call like this, made if it is new; None where the class's own forward must run."""
        if watcher is None and module_hooks._has_any_global_hook():
            return None
        arguments = Arguments.of(args, kwargs)
        plan = self.known_plan(arguments)
        full = len(self.plans) >= MOST_PLANS
        if (plan is not None and not full) or torch.compiler.is_dynamo_compiling():
            return plan
        if plan is not None:
            plan.used = next(_clock)
            return plan
        if full and not self._repeats(arguments):
            return None
        with ONE_AT_A_TIME:  # another thread may have made it by now
            return self.known_plan(arguments) or self.make_plan(arguments)

    def _repeats(self, arguments: Arguments) -> bool:
        """Whether a call for which there is no plan has been made as often as makes one worth it."""
        if not self.fusion.told:
            self.fusion.told = True
            log.warning(
                "fuse: %s has been called in %d ways (values of an attribute, or of a number it is given): "
                "any other runs unfused until it has come %d times",
                self.path or "the model",
                MOST_PLANS,
                WORTH_A_PLAN,
            )
        missed = next((missed for missed in tuple(self.missed) if missed.arguments == arguments), None)
        if missed is None:
            self.missed.append(Missed(arguments))
        elif missed.guard is None or not missed.guard.holds():
            missed.guard, missed.times = self.plans[0].guard.renewed(), 0
        else:
            missed.times += 1
        return missed is not None and missed.times >= WORTH_A_PLAN

    def known_plan(self, arguments: Arguments) -> Plan | None:
        for plan in self.plans:
            if plan.arguments == arguments and plan.guard.holds():
                return plan
        return None

    def make_plan(self, arguments: Arguments) -> Plan:
        plan = make_plan(self.module, self.path, arguments, self.shared, self.fusion)
        plan.used = next(_clock)
        kept = self.plans
        if len(kept) >= MOST_PLANS:
            oldest = min(kept, key=lambda plan: plan.used)
            kept = [plan for plan in kept if plan is not oldest]
        self.plans = [plan, *kept]  # a new list: another thread may be walking the old one
        return plan

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold code; they are made again at the next call.
        return {**vars(self), "plans": [], "missed": deque(maxlen=self.missed.maxlen)}

    def __repr__(self) -> str:
        return f"Region({self.path or 'the model'})"


@contextmanager
def watched_by(other: Watcher) -> Iterator[None]:
    """`other` runs the plans of all regions."""
    global watcher
    before, watcher = watcher, other
    try:
        yield
    finally:
        watcher = before


def run_apart(region: Region, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The class's own forward, in which nothing is fused."""
    return type(region.module).forward(region.module, *args, **kwargs)


def absolute(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def make_plan(module: nn.Module, path: str, arguments: Arguments, shared: frozenset[str], fusion: Fusion) -> Plan:
    """What to do when `module`, which is `path` in the fused model, is called with arguments of this kind."""
    try:
        traced = trace(module, arguments)
    except RefusedError as refusal:
        return Plan(arguments, Guard([module]), refusal=str(refusal))
    plan = Plan(arguments, _guard(traced), find_chains(traced, shared), traced)
    for chain in plan.chains:
        if chain.reason is None:
            chain.reason = _why_not(chain, path, module.training, fusion)
    if plan.fused:
        try:
            plan.run = compiled(traced, plan.fused)
        except (SyntaxError, RecursionError, MemoryError) as error:  # modules nested deeper than Python's parser goes
            return Plan(arguments, Guard([module]), refusal=f"its code cannot be written: {error}")
    return plan


def _why_not(chain: Chain, path: str, training: bool, fusion: Fusion) -> str | None:
    if fusion.options.eval_only and training:
        return "eval_only: nothing is fused in training mode"
    excluded = fusion.options.excluded([absolute(path, name) for name in chain.modules])
    if excluded:
        return excluded
    key = chain_key(chain, path, training)
    return fusion.verdicts.get(key) if fusion.sized else without_sizes(chain)


def chain_key(chain: Chain, path: str, training: bool) -> tuple[bool, str]:
    return training, " ".join(absolute(path, part) for part in chain.key)


def _guard(traced: Trace) -> Guard:
    """Watches what the graph says something about: not the inside of modules that it calls as a whole."""
    called = {traced.module(node) for node in traced.graph.nodes if node.op == "call_module"}
    watched: dict[nn.Module, None] = {}
    others: dict[nn.Module, None] = {}
    inlined = set(traced.inlined.values())
    left = [traced.root]
    while left:
        module = left.pop()
        if module in watched or module in others or sealed(module):
            continue
        space = type(module).forward is nn.Module.forward  # a list of modules, or a module that only holds others
        whole = module in called and not is_known(module)
        (watched if module in inlined or space or (module in called and not whole) else others)[module] = None
        # `parameters()` goes through all children.
        if traced.asked or not whole:
            left += [child for child in module._modules.values() if child is not None]
    open_modules = [module for module in traced.root.modules() if not sealed(module)]
    return Guard(watched, others, open_modules, traced.asked)


def compiled(traced: Trace, chains: list[Chain]) -> Callable[..., Any]:
    """The function `run(module, *inputs)` of the graph with these chains fused. The trace itself stays as it is."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(traced.graph, copies)
    graph.output(result)
    moved = [
        Chain([copies[node] for node in chain.nodes], [_moved(operation, copies) for operation in chain.operations])
        for chain in chains
    ]
    rewrite(graph, moved)
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<onelaunch.fuse>", "exec"), names)
    return names["forward"]


def _moved(operation: Any, copies: dict[fx.Node, fx.Node]) -> Any:
    arguments = fx.node.map_arg(operation.arguments, lambda node: copies[node])
    return replace(operation, arguments=arguments)
