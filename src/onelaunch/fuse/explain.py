"""`ol.explain(model, *inputs)`: for every operation of a model who runs it, what that costs, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from onelaunch.errors import OnelaunchError, abbreviate_list
from onelaunch.fuse.captured import Captured, capture_graphs, uncompiled_call
from onelaunch.fuse.costs import fused_cost, is_counter, is_library_call, is_view, unfused_cost
from onelaunch.fuse.decide import copied, device_of, known_seconds, restored
from onelaunch.fuse.explanation import INDUCTOR, LIBRARY, OURS, Explanation, Group, Operation
from onelaunch.fuse.fuse import check_model
from onelaunch.fuse.graph import module_of, operation_of, tensor_of
from onelaunch.fuse.patterns import find_matches, pays
from onelaunch.fuse.patterns.pattern import Match
from onelaunch.fuse.roofline import Cost, DeviceModel, device_model, named_device

NO_PATTERN = "no pattern for it"
MAX_FUSED = 24  # operations that Inductor is predicted to put into one kernel


def explain(model: nn.Module, *inputs: Any, device: str | None = None, **named_inputs: Any) -> Explanation:
    """Capture the model's graph on these inputs, in the mode it is in, and say for each operation who runs it and why.

    Times are predicted from bytes, arithmetic and launches for the device of the inputs (an H200 for a CPU), or for the one
    that `device` names, such as "A100". The model runs once; its buffers and the random generators are restored.
    """
    check_model(model)
    if not inputs and not named_inputs:
        raise OnelaunchError("inputs is empty: pass example inputs, as in ol.explain(model, x)")
    where = device_of(inputs, named_inputs) or torch.device("cpu")
    roof = named_device(device) if device is not None else device_model(where)
    args, kwargs = copied((inputs, named_inputs))
    with restored(model):
        captured = capture_graphs(uncompiled_call(model), args, kwargs)
        measured = known_seconds(model, captured, where)
    explanation = Explanation(type(model).__name__, model.training, roof, [], [], measured=measured)
    for number, one in enumerate(captured):
        _add_graph(explanation, one, on_cuda=where.type == "cuda")
        if one.break_reason:
            explanation.notes.append(f"graph {number + 1} of {len(captured)} ends here: {one.break_reason}")
    if not captured:
        explanation.notes.append("Dynamo captured no graph: the model runs as PyTorch operations")
    alone = Counter(group.name for group in explanation.groups if group.reason.startswith(NO_PATTERN))
    if alone:
        said = [name if count == 1 else f"{name} × {count}" for name, count in alone.most_common()]
        explanation.notes.append(f"no pattern of ours covers {abbreviate_list(said)}: Inductor runs each by itself")
    return explanation


def _add_graph(explanation: Explanation, captured: Captured, *, on_cuda: bool) -> None:
    calls = [node for node in captured.graph.nodes if node.op in ("call_function", "call_method")]
    nodes = [node for node in calls if not is_view(node) and not is_counter(node)]
    first = len(explanation.operations)
    index = {node: first + number for number, node in enumerate(nodes)}
    for node in nodes:
        explanation.operations.append(_operation(node, index, explanation.device))
    taken: set[fx.Node] = set()
    groups: list[tuple[int, Group]] = []
    # Without CUDA the explanation is of the device it names: what would pay there.
    for match in find_matches(captured.graph, pays if on_cuda else lambda match: match.pattern.pays(match)):
        taken.update(match.nodes)
        groups.append((index[match.nodes[0]], _our_group(match, index, explanation.device)))
    unpaid = {node: match for match in find_matches(captured.graph) for node in match.nodes}
    rest = [node for node in nodes if node not in taken]
    for cluster in _inductor_kernels(rest, taken):
        groups.append((index[cluster[0]], _other_group(cluster, unpaid, index, explanation.device)))
    explanation.groups += [group for _, group in sorted(groups, key=lambda entry: entry[0])]


def _operation(node: fx.Node, index: dict[fx.Node, int], roof: DeviceModel) -> Operation:
    cost = unfused_cost(node)
    tensor = tensor_of(node)
    dtype = tensor.dtype if tensor is not None else torch.float32
    shape = tuple(map(int, tensor.shape)) if tensor is not None else ()
    return Operation(_name(node), module_of(node), cost, roof.seconds(cost, dtype), dtype, shape, _sources(node, index))


def _sources(node: fx.Node, index: dict[fx.Node, int]) -> tuple[int, ...]:
    """The operations that `node` reads, through views."""
    found: list[int] = []
    open_nodes = list(node.all_input_nodes)
    while open_nodes:
        source = open_nodes.pop()
        if source in index:
            found.append(index[source])
        else:
            open_nodes += source.all_input_nodes
    return tuple(sorted(set(found)))


def _name(node: fx.Node) -> str:
    operation = operation_of(node)
    if operation is not None:
        return operation.activation or operation.name
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return target.strip("_")


def _inductor_kernels(nodes: list[fx.Node], outside: set[fx.Node]) -> list[list[fx.Node]]:
    """A prediction of Inductor's kernels: neighbours share one, unless a library call or a kernel of ours is between them.

    `outside` are the nodes that others run. The depth of a node is the number of such calls before it, so that a kernel with
    nodes of one depth waits for none that waits for it.
    """
    clusters: list[list[fx.Node]] = []
    of: dict[fx.Node, list[fx.Node]] = {}
    depth: dict[fx.Node, int] = {}
    mine = set(nodes)
    for node in nodes[0].graph.nodes if nodes else ():
        separate = node in outside or (node in mine and is_library_call(node))
        depth[node] = max((depth[source] for source in node.all_input_nodes), default=0) + separate
        if node not in mine:
            continue
        if separate:
            clusters.append([node])
            continue
        near = [source for source in _through_views(node) if source in of and depth[source] == depth[node]]
        joined = next((of[source] for source in near if len(of[source]) < MAX_FUSED), None)
        if joined is None:
            joined = []
            clusters.append(joined)
        joined.append(node)
        of[node] = joined
    return clusters


def _through_views(node: fx.Node) -> list[fx.Node]:
    found = []
    for source in node.all_input_nodes:
        while is_view(source) and source.op != "placeholder" and source.all_input_nodes:
            source = source.all_input_nodes[0]
        found.append(source)
    return found


def _our_group(match: Match, index: dict[fx.Node, int], roof: DeviceModel) -> Group:
    before = sum((unfused_cost(node) for node in match.nodes), Cost())
    after = match.pattern.cost(match)
    return _group(match.title, OURS, list(match.nodes), index, roof, f"pattern {match.pattern.name}", before, after)


def _other_group(
    nodes: list[fx.Node], unpaid: dict[fx.Node, Match], index: dict[fx.Node, int], roof: DeviceModel
) -> Group:
    """`unpaid`: the matches that patterns found but did not take, by their nodes."""
    before = sum((unfused_cost(node) for node in nodes), Cost())
    found = next((unpaid[node] for node in nodes if node in unpaid), None)
    said = f"pattern {found.pattern.name} does not pay for this size, type or mode" if found is not None else ""
    if is_library_call(nodes[0]):
        return _group(_name(nodes[0]), LIBRARY, nodes, index, roof, said, before, before)
    after = fused_cost(nodes) if len(nodes) > 1 else before
    if len(nodes) > 1:
        reason = f"one kernel for {len(nodes)} operations"
    else:
        reason = said or f"{NO_PATTERN} and no neighbour to share a kernel with"
    return _group(" + ".join(map(_name, nodes)), INDUCTOR, nodes, index, roof, reason, before, after)


def _group(
    name: str, runs: str, nodes: list[fx.Node], index: dict[fx.Node, int], roof: DeviceModel, reason: str, before: Cost,
    after: Cost,
) -> Group:  # fmt: skip
    tensor = tensor_of(nodes[-1])
    dtype = tensor.dtype if tensor is not None else torch.float32
    seconds = sum(roof.seconds(unfused_cost(node), dtype) for node in nodes)
    where = next(filter(None, map(module_of, nodes)), "")
    indices = tuple(index[node] for node in nodes if node in index)
    return Group(name, runs, indices, where, reason, before, after, dtype, (seconds, roof.seconds(after, dtype)))
