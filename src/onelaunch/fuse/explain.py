"""`ol.explain(model, *inputs)`: for every operation of a model who runs it, what that costs, and why."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from onelaunch.errors import OnelaunchError, abbreviate_list, first_line
from onelaunch.fuse.backend import no_code_generator_reason
from onelaunch.fuse.captured import CHECKPOINTED, Captured, capture_graphs, uncompiled_call, with_blocks_inlined
from onelaunch.fuse.costs import fused_cost, is_counter, is_library_call, is_view, scatters, unfused_cost
from onelaunch.fuse.decide import ALL, chosen_patterns, known_seconds, patterns_in
from onelaunch.fuse.explanation import INDUCTOR, LIBRARY, OURS, Explanation, Group, Operation
from onelaunch.fuse.fuse import check_model
from onelaunch.fuse.generated import Kernel, read_kernels
from onelaunch.fuse.graph import module_of, name_of, operation_of, tensor_of, tensors_of
from onelaunch.fuse.memory import in_memory
from onelaunch.fuse.patterns import find_matches, pays, pays_on_device, pays_without_graph
from onelaunch.fuse.patterns.pattern import Match
from onelaunch.roofline import Cost, DeviceModel, device_model, named_device
from onelaunch.trial_runs import copied, device_of, restored, run_once, trial_mode
from onelaunch.wrong_inputs import require_known_names, require_possible

NO_PATTERN = "no pattern takes "
MAX_FUSED = 24  # operations that Inductor is predicted to put into one kernel


class Unit(NamedTuple):
    """Operations that run as one."""

    runs: str  # OURS, INDUCTOR or LIBRARY
    nodes: list[fx.Node]
    kernels: list[Kernel]  # that Inductor made of them; none where that is predicted


def explain(model: nn.Module, *inputs: Any, device: str | None = None, **named_inputs: Any) -> Explanation:
    """Capture the model's graph on these inputs, in the mode it is in, and say for each operation who runs it and why.

    On CUDA the kernels are read from what Inductor generates, and timed. Elsewhere they are predicted, as are times, from
    bytes, arithmetic and launches: for the device of the inputs (an H200 for a CPU), or the one that `device` names, such as
    "A100". Evaluation is explained without gradients. The model's attributes, its buffers and the random generators are
    restored.
    """
    check_model(model)
    if not inputs and not named_inputs:
        raise OnelaunchError("inputs is empty: pass example inputs, as in ol.explain(model, x)")
    require_known_names("explain", model, named_inputs)
    where = device_of(inputs, named_inputs) or torch.device("cpu")
    roof = named_device(device) if device is not None else device_model(where)
    args, kwargs = copied((inputs, named_inputs))
    call = uncompiled_call(model)
    with restored(model), trial_mode(model, args, kwargs):
        try:
            captured = capture_graphs(call, args, kwargs)
        except Exception:
            require_possible("explain", call, model, inputs, named_inputs)
            raise
        measured = known_seconds(model, captured, where)
        loss = captured[-1].loss if model.training and not measured else None
        if loss is not None:  # as in `train_step`
            call = uncompiled_call(model, loss_alone=True)
            captured[-1].graph.output_node().args = ((loss,),)
        chosen = chosen_patterns(measured) if measured else ALL
        in_graph = not measured or not torch.is_grad_enabled()  # unmeasured: as inside `train_step`
        explanation = Explanation(type(model).__name__, model.training, roof, [], [], measured=measured)
        if loss is not None:
            explanation.notes.append("what the model returns beside its loss is left out, as train_step does")
        explanation.imagined = where.type == "cpu" and device is None
        kernels = None
        if is_read(where):
            try:
                run = functools.partial(run_once, model=model, args=args, kwargs=kwargs)
                kernels = read_kernels(call, run, chosen, in_graph, where.type == "cuda")
            except Exception as error:  # of a compiler
                explanation.notes.append(f"predicted, since Inductor cannot compile the model: {first_line(error)}")
    explanation.read = kernels is not None
    wanted = (pays if in_graph else pays_without_graph) if where.type == "cuda" else pays_on_device
    captured = [replace(one, graph=with_blocks_inlined(one.graph)) for one in captured]
    for number, one in enumerate(captured):
        mine = [kernel for kernel in kernels if kernel.graph == number] if kernels is not None else None
        _add_graph(explanation, one, mine, chosen, wanted)
        if one.break_reason and explanation.operations:
            explanation.notes.append(f"graph {number + 1} of {len(captured)} ends here: {one.break_reason}")
    if not explanation.operations:
        reason = captured[0].break_reason or "it has no operations"
        explanation.notes.append(f"Dynamo captured nothing ({reason}): the model runs as PyTorch operations")
    elif missing := _uncaptured_parts(model, captured):
        explanation.notes.append(
            f"in no captured graph, or unused ({captured[-1].left_out}): {abbreviate_list(missing)}"
        )
    if model.training and any(CHECKPOINTED in node.meta for one in captured for node in one.graph.nodes):
        explanation.notes.append("the second forward pass of checkpointed blocks is not counted")
    chains = Counter(group.reason for group in explanation.groups if group.reason.startswith(NO_PATTERN))
    if chains:
        said = [f"{name.removeprefix(NO_PATTERN)}{f' × {n}' if n > 1 else ''}" for name, n in chains.most_common()]
        explanation.notes.append(f"chains that no pattern of ours takes: {abbreviate_list(said)}")
    return explanation


def _uncaptured_parts(model: nn.Module, captured: list[Captured]) -> list[str]:
    """The outermost modules of whose parameters no captured operation uses any, if Dynamo has left out operations."""
    if not captured[-1].left_out:
        return []
    used = frozenset[int]().union(*(one.parameters for one in captured))
    parts: list[str] = []
    for name, module in model.named_modules():
        mine = [id(parameter) for parameter in module.parameters()]
        if name and mine and used.isdisjoint(mine) and not any(name.startswith(f"{part}.") for part in parts):
            parts.append(name)
    return parts


def is_read(device: torch.device) -> bool:
    """Whether the kernels are read from generated code: it is the code that will run, and takes as long as compiling."""
    return device.type == "cuda" and not no_code_generator_reason("cuda")


def _add_graph(
    explanation: Explanation, captured: Captured, kernels: list[Kernel] | None, chosen: tuple[str, ...],
    wanted: Callable[[Match], bool],
) -> None:  # fmt: skip
    calls = [node for node in captured.graph.nodes if node.op in ("call_function", "call_method")]
    nodes = [node for node in calls if not is_view(node) and not is_counter(node)]
    first = len(explanation.operations)
    index = {node: first + number for number, node in enumerate(nodes)}
    sources = {node: _sources(node, index) for node in nodes}
    explanation.operations += [
        _operation(node, [index[one] for one in sources[node]], explanation.device) for node in nodes
    ]

    def accepted(match: Match) -> bool:
        return (
            match.pattern.name in chosen and wanted(match) and not any(CHECKPOINTED in one.meta for one in match.nodes)
        )

    ours = {match.nodes[0]: match for match in find_matches(captured.graph, accepted)}
    taken = {node for match in ours.values() for node in match.nodes}
    left = {node: match for match in find_matches(captured.graph) for node in match.nodes if node not in taken}
    if kernels is not None:
        units = _read_units(nodes, kernels, ours.values())
    else:
        units = [Unit(OURS, [node for node in match.nodes if node in index], []) for match in ours.values()]
        for cluster in _inductor_kernels([node for node in nodes if node not in taken], taken):
            units.append(Unit(LIBRARY if is_library_call(cluster[0]) else INDUCTOR, cluster, []))
    runs = {node: unit.runs for unit in units for node in unit.nodes}
    tried = {name for candidate in explanation.measured for name in patterns_in(candidate)}
    for unit in sorted(units, key=lambda unit: index[unit.nodes[0]]):
        match = ours.get(unit.nodes[0]) if unit.runs == OURS else None
        reason = f"pattern {match.pattern.name}" if match is not None else ""
        reason = reason or _reason(unit, left, runs, sources, chosen, tried, kernels is not None)
        explanation.groups.append(_group(unit, match, reason, index, explanation.device, kernels is not None))


def _read_units(nodes: list[fx.Node], kernels: list[Kernel], ours: Iterable[Match]) -> list[Unit]:
    """Each operation with the first forward kernel that computes it; each kernel with the operations that it computes."""
    by_name = {node.name: node for node in nodes}
    units = [Unit(OURS, [node for node in match.nodes if node.name in by_name], []) for match in ours]
    of = {node: unit for unit in units for node in unit.nodes}
    waiting: list[Kernel] = []  # those of no operation, such as random seeds, count with the next kernel
    for kernel in kernels:
        sources = [by_name[name] for name in kernel.sources if name in by_name]
        mine = [] if kernel.backward else sorted((node for node in sources if node not in of), key=nodes.index)
        if mine:
            units.append(Unit(kernel.runs, mine, []))
            of |= dict.fromkeys(mine, units[-1])
        elif not sources or not any(node in of for node in sources):
            waiting.append(kernel)
            continue
        counts = Counter(units.index(of[node]) for node in sources if node in of)
        unit = units[-1] if mine else units[counts.most_common(1)[0][0]]
        unit.kernels.extend([*waiting, kernel])
        waiting = []
    units += [Unit(INDUCTOR, [node], []) for node in nodes if node not in of]
    for number, unit in enumerate(units):
        calls = any(kernel.runs == LIBRARY and kernel.sources and not kernel.backward for kernel in unit.kernels)
        units[number] = unit._replace(runs=LIBRARY) if calls and unit.runs != OURS else unit
    return units


def _reason(
    unit: Unit, left: dict[fx.Node, Match], runs: dict[fx.Node, str], sources: dict[fx.Node, list[fx.Node]],
    chosen: tuple[str, ...], tried: set[str], read: bool,
) -> str:  # fmt: skip
    """Why a unit that no pattern took is as it is.

    left: matches that were not taken, by their nodes; chosen, tried: names of the patterns that are used, and were measured.
    """
    found = next((left[node] for node in unit.nodes if node in left), None)
    if found is not None and (unit.runs == LIBRARY or len(unit.nodes) == 1):
        name = found.pattern.name
        if CHECKPOINTED in found.nodes[0].meta:
            return f"pattern {name} is not used in checkpointed blocks"
        lost = "was slower" if name in tried and name not in chosen else "is for CUDA graphs, as of train_step"
        return f"pattern {name} {lost if pays_on_device(found) else 'does not pay for this size, type or mode'}"
    if read and not unit.kernels:
        return "no kernel: the compiler has removed it, or computes it inside others"
    forward = sum(not kernel.backward for kernel in unit.kernels) or 1
    if len(unit.nodes) > 1 or forward > 1:
        many = f"{len(unit.nodes)} operations" if len(unit.nodes) > 1 else "it"
        return f"{'one kernel' if forward == 1 else f'{forward} kernels'} for {many}"
    node = unit.nodes[0]
    users = [user for user in runs if node in sources[user]]
    if unit.runs == LIBRARY:
        return f"{NO_PATTERN}{_name(node)} → {_name(users[0])}" if users and runs[users[0]] == INDUCTOR else ""
    near = [*sources[node], *users]
    if any(runs[other] == INDUCTOR for other in near):
        return "not joined with its neighbours"
    said = " and ".join(dict.fromkeys(f"{_name(other)} ({runs[other]})" for other in near))
    return f"alone {'between' if ' and ' in said else 'beside'} {said}" if said else "no neighbours"


def _operation(node: fx.Node, sources: list[int], roof: DeviceModel) -> Operation:
    cost = unfused_cost(node)
    tensor = next(map(in_memory, tensors_of(node)), None)
    dtype = tensor.dtype if tensor is not None else torch.float32
    shape = tuple(map(int, tensor.shape)) if tensor is not None else ()
    return Operation(
        _name(node), module_of(node), cost, roof.seconds(cost, dtype), dtype, shape, tuple(sorted(sources))
    )


def _sources(node: fx.Node, among: Collection[fx.Node]) -> list[fx.Node]:
    """The operations among these that `node` reads, through views, in the order of its arguments."""
    found: list[fx.Node] = []
    seen, waiting = set(), node.all_input_nodes[::-1]
    while waiting:
        source = waiting.pop()
        if source in among and source not in seen:
            found.append(source)
        elif source not in seen:
            waiting += source.all_input_nodes[::-1]
        seen.add(source)
    return found


def _name(node: fx.Node) -> str:
    operation = operation_of(node)
    if operation is not None:
        return operation.activation or operation.name
    return name_of(node).strip("_").removesuffix("_forward").removesuffix("_fwd")


def _inductor_kernels(nodes: list[fx.Node], outside: set[fx.Node]) -> list[list[fx.Node]]:
    """A prediction of Inductor's kernels: neighbours share one, unless a library call, a kernel of ours or one that scatters is
    between them.

    `outside` are the nodes that others run. The depth of a node is the number of such calls before it, so that a kernel with
    nodes of one depth waits for none that waits for it.
    """
    clusters: list[list[fx.Node]] = []
    of: dict[fx.Node, list[fx.Node]] = {}
    depth: dict[fx.Node, int] = {}
    mine = set(nodes)
    ends = mine | outside
    for node in nodes[0].graph.nodes if nodes else ():
        separate = node in outside or (node in mine and (is_library_call(node) or scatters(node)))
        depth[node] = max((depth[source] for source in node.all_input_nodes), default=0) + separate
        if node not in mine:
            continue
        if separate:
            clusters.append([node])
            continue
        near = [source for source in _sources(node, ends) if source in of and depth[source] == depth[node]]
        joined = next((of[source] for source in near if len(of[source]) < MAX_FUSED), None)
        if joined is None:
            joined = []
            clusters.append(joined)
        joined.append(node)
        of[node] = joined
    return clusters


def _group(
    unit: Unit, match: Match | None, reason: str, index: dict[fx.Node, int], roof: DeviceModel, read: bool
) -> Group:
    nodes = unit.nodes if match is None else list(match.nodes)
    tensor = tensor_of(nodes[-1])
    dtype = tensor.dtype if tensor is not None else torch.float32
    before = sum((unfused_cost(node) for node in nodes), Cost())
    after = before if len(nodes) == 1 else replace(both := fused_cost(nodes), bytes=min(both.bytes, before.bytes))
    after = match.pattern.cost(match) if match is not None else after
    measured = None
    if read:
        after = replace(after, launches=len(unit.kernels)) if unit.kernels else Cost()
        times = [kernel.seconds for kernel in unit.kernels]
        measured = sum(filter(None, times)) if None not in times else None
    seconds = sum(roof.seconds(unfused_cost(node), dtype) for node in nodes)
    return Group(
        match.title if match is not None else " + ".join(map(_name, nodes)), unit.runs,
        tuple(index[node] for node in unit.nodes), next(filter(None, map(module_of, nodes)), ""), reason, before, after,
        dtype, (seconds, roof.seconds(after, dtype)), measured,
    )  # fmt: skip
