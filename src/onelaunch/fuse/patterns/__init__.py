"""The patterns, in the order in which they are tried; a node belongs to the first that takes it."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from onelaunch.fuse.patterns.activation_dropout import ReluDropout
from onelaunch.fuse.patterns.batch_norm import BatchNormActivationDropout
from onelaunch.fuse.patterns.cross_entropy import CrossEntropy
from onelaunch.fuse.patterns.linear import LinearActivationDropout
from onelaunch.fuse.patterns.linear_cross_entropy import LinearCrossEntropy
from onelaunch.fuse.patterns.pattern import Match, Pattern

PATTERNS: tuple[Pattern, ...] = (
    LinearCrossEntropy(),
    LinearActivationDropout(),
    BatchNormActivationDropout(),
    ReluDropout(),
    CrossEntropy(),
)
BY_NAME = {pattern.name: pattern for pattern in PATTERNS}


def find_matches(graph: fx.Graph) -> list[Match]:
    """What the patterns find in `graph`, in its order; no node is in two of them."""
    taken: set[fx.Node] = set()
    found = []
    for node in graph.nodes:
        for pattern in PATTERNS:
            match = None if node in taken else pattern.match(node)
            if match is not None and taken.isdisjoint(match.nodes):
                found.append(match)
                taken.update(match.nodes)
    return found


def rewrite(module: fx.GraphModule, names: Collection[str], *, forced: bool = False) -> list[Match]:
    """Replace what the patterns called `names` find in the graph, where it pays; what was replaced.

    With `forced`, a match is replaced whether it pays or not.
    """
    matches = [
        match
        for match in find_matches(module.graph)
        if match.pattern.name in names and (forced or match.pattern.pays(match))
    ]
    replaced: dict[fx.Node, fx.Node] = {}  # an earlier match's last node may be an argument of a later one
    for match in matches:
        last = match.nodes[-1]
        for name, value in match.arguments.items():
            if isinstance(value, fx.Node):
                match.arguments[name] = replaced.get(value, value)
        with module.graph.inserting_before(last):
            replacement = match.pattern.replace(module.graph, match)
        replacement.meta = dict(last.meta)
        last.replace_all_uses_with(replacement)
        replaced[last] = replacement
        for node in reversed(match.nodes):
            module.graph.erase_node(node)
    if matches:
        module.recompile()
    return matches
