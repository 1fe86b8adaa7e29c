"""The patterns, in the order in which they are tried; a node belongs to the first that takes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from onelaunch.fuse.graph import number_of_values, tensor_of
from onelaunch.fuse.memory import memory_written_by, storages_of
from onelaunch.fuse.modes import mark_modes, share_mode
from onelaunch.fuse.patterns.activation_dropout import ReluDropout
from onelaunch.fuse.patterns.aligned_linear import AlignedLinear
from onelaunch.fuse.patterns.attention import MaskedAttention
from onelaunch.fuse.patterns.convolution import ConvolutionBatchNormRelu
from onelaunch.fuse.patterns.linear import LinearActivationDropout
from onelaunch.fuse.patterns.linear_cross_entropy import LinearCrossEntropy
from onelaunch.fuse.patterns.mlp import SmallMlp
from onelaunch.fuse.patterns.parallel_linear import ParallelLinear, without_parts
from onelaunch.fuse.patterns.pattern import Match, Pattern, is_on_cuda

PATTERNS: tuple[Pattern, ...] = (
    LinearCrossEntropy(), SmallMlp(), ParallelLinear(), AlignedLinear(), LinearActivationDropout(), ConvolutionBatchNormRelu(),
    ReluDropout(), MaskedAttention(),
)  # fmt: skip
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}
# Patterns that call no op of ours, or gain more than its call costs.
AT_ANY_SIZE = ("parallel_linear", "aligned_linear", "attention")
# Of the first result of a match. The call of an op of ours takes the host 100 µs and more longer than the launch of a kernel of
# Inductor's: BERT (32 x 128) by `ol.fuse` in training takes 32.0 ms with `linear`, whose results have up to 25 MB, and 20.9
# without, with the device idle most of the time. From this size on the device takes longer than the host.
MIN_BYTES = 2**27
REPLACES = "onelaunch_replaces"  # the key of the metadata of a replacement: names of the operations it stands for


def find_matches(graph: fx.Graph, accepted: Callable[[Match], bool] = lambda match: True) -> list[Match]:
    """What the patterns find in `graph`, in its order, as far as it is `accepted`; no node is in two of them."""
    mark_modes(graph)
    taken: set[fx.Node] = set()
    found = []

    def find(pattern: Pattern, node: fx.Node) -> Match | None:
        match = pattern.match(node)
        if match is None or not taken.isdisjoint(match.nodes) or not share_mode(match.nodes):
            return None
        return match if accepted(match) and not _is_overwritten(match) else None

    for node in graph.nodes:
        for pattern in PATTERNS:
            with contextlib.suppress(GuardOnDataDependentSymNode):  # a size that only the run knows decides: no match
                if node not in taken and (match := find(pattern, node)) is not None:
                    found.append(match)
                    taken.update(match.nodes)
    return without_parts(found)


def pays_on_device(match: Match) -> bool:
    """Whether a match would pay on a CUDA device."""
    return match.pattern.pays(match)


def pays(match: Match) -> bool:
    return is_on_cuda(match) and pays_on_device(match)


def pays_without_graph(match: Match) -> bool:
    """Whether a match also pays where each kernel is launched from Python: large ones, and those of AT_ANY_SIZE."""
    result = tensor_of(match.nodes[0])
    large = result is not None and number_of_values(result) * result.element_size() >= MIN_BYTES
    return pays(match) and (match.pattern.name in AT_ANY_SIZE or large)


def _late_arguments(match: Match) -> set[fx.Node]:
    """Arguments that another than the first replaced operation reads, such as a loss's target."""
    used: set[fx.Node] = set()
    fx.node.map_arg(match.arguments, used.add)
    first, *others = (set(node.all_input_nodes) for node in match.nodes)
    return used - first.difference(*others)


def _is_overwritten(match: Match) -> bool:
    """Whether the replacement must stand where the last operation did, but its inputs no longer have their values there."""
    if not _late_arguments(match):
        return False
    inside, read = set(match.nodes), set()
    node = match.nodes[0]
    while node is not match.nodes[-1]:
        if node in inside:
            read |= storages_of(*(source for source in node.all_input_nodes if source not in inside))
        node = node.next
        if memory_written_by(node) & read:
            return True
    return False


def rewrite(
    module: fx.GraphModule, names: Collection[str], *, forced: bool = False, in_graph: bool = True
) -> list[Match]:
    """Replace what the patterns called `names` find in the graph, where it pays; what was replaced.

    With `forced`, a match is replaced whether it pays or not; without `in_graph`, where it pays outside a CUDA graph.
    """
    wanted = (lambda match: True) if forced else pays if in_graph else pays_without_graph
    matches = find_matches(module.graph, lambda match: match.pattern.name in names and wanted(match))
    replaced: dict[fx.Node, fx.Node] = {}  # an earlier match's last node may be an argument of a later one
    for match in matches:
        last = match.nodes[-1]
        for name, value in match.arguments.items():
            if isinstance(value, fx.Node):
                match.arguments[name] = replaced.get(value, value)
        # Before the first operation: what it reads may change afterwards.
        with module.graph.inserting_before(last if _late_arguments(match) else match.nodes[0]):
            made = match.pattern.replace(module.graph, match)
        replaced_names = {REPLACES: [node.name for node in match.nodes]}
        made.meta, extra = last.meta | replaced_names, made.prev
        while not extra.meta:  # what else `replace` has inserted
            extra.meta, extra = dict(replaced_names), extra.prev
        last.replace_all_uses_with(made)
        replaced[last] = made
        for node in reversed(match.nodes):
            module.graph.erase_node(node)
    if matches:
        module.recompile()
    return matches
