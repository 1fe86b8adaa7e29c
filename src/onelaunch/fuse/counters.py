"""Counters of a captured graph, such as the batches that a batch norm has seen, as one operation beside the compiled program.

Inductor makes a kernel of each. A network has up to a few hundred, each as long as a small layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from onelaunch.fuse.graph import name_of, tensor_of
from onelaunch.fuse.memory import storages_of

Program = Callable[..., Any]
Counts = dict[tuple[Any, ...], list[int]]  # how much is added, and to which kind of tensor: the positions of the inputs


def take_counters(gm: fx.GraphModule) -> Callable[[Program], Program]:
    """Take counters out of the graph; what turns its compiled form into a program that counts as well."""
    graph = gm.graph
    inputs = graph.find_nodes(op="placeholder")
    owners = Counter(memory for node in inputs for memory in storages_of(node))
    counts: Counts = defaultdict(list)
    for position, node in enumerate(inputs):
        count = next(iter(node.users), None)
        if count is None or not _counts(count, node) or owners[next(iter(storages_of(node)))] > 1:
            continue
        counter = tensor_of(node)
        assert counter is not None
        counts[count.args[1], counter.device, counter.dtype].append(position)
        graph.erase_node(count)
    if not counts:
        return lambda program: program
    gm.recompile()
    return lambda program: _counting(program, counts)


def _counts(node: fx.Node, counter: fx.Node) -> bool:
    """Whether the node adds a constant to a whole number in place, and nothing else reads either."""
    value = tensor_of(counter)
    if value is None or value.dim() or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        return False
    is_constant = len(node.args) == 2 and type(node.args[1]) is int and not node.kwargs
    alone = len(counter.users) == 1 and not node.users and node.args[0] is counter
    return alone and is_constant and name_of(node) in ("add_", "iadd")


def _counting(program: Program, counts: Counts) -> Program:
    def counting(*args: Any) -> Any:
        for (amount, *_), positions in counts.items():
            torch._foreach_add_([args[position] for position in positions], amount)
        return program(*args)

    return counting
