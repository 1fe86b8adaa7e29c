"""In which mode each operation of a captured graph runs: with gradients or without, under which autocast, inside `torch.vmap`.

Dynamo records the calls that change a mode among the operations. What two operations compute may be computed in one place only
if they run in one mode.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from onelaunch.fuse.graph import name_of

MODE = "onelaunch_mode"  # the key of the metadata of an operation; its value is None inside a transformation
TRANSFORMATIONS = {  # calls that begin and end vmap, grad or jvp, where tensors stand for others: how far inside
    "_vmap_increment_nesting": 1, "_grad_increment_nesting": 1, "_jvp_increment_nesting": 1, "_enter_dual_level": 1,
    "_vmap_decrement_nesting": -1, "_grad_decrement_nesting": -1, "_jvp_decrement_nesting": -1, "_exit_dual_level": -1,
}  # fmt: skip


def mark_modes(graph: fx.Graph) -> None:
    """Write the mode of each operation into its metadata."""
    grad_modes = [node.args[0] for node in graph.nodes if node.target is torch._C._set_grad_enabled]
    # Dynamo records the call only where it changes something. Keys are the calls without their last arguments.
    mode = {"_set_grad_enabled()": str((not grad_modes[0],))} if grad_modes else {}
    depth = 0
    for node in graph.nodes:
        name = name_of(node)
        if not _sets_mode(node):
            node.meta[MODE] = tuple(sorted(mode.items())) if depth == 0 else None
        elif name in TRANSFORMATIONS:
            depth += TRANSFORMATIONS[name]
        elif "exit" in name and node.all_input_nodes:  # such as _exit_autocast, which gets the value of _enter_autocast
            mode.pop(node.all_input_nodes[0].name, None)
        elif node.users:
            mode[node.name] = f"{name}{node.args}"
        else:
            mode[f"{name}{node.args[:-1]}"] = str(node.args[-1:])


def share_mode(nodes: Collection[fx.Node]) -> bool:
    """Whether these operations run in one mode, outside transformations."""
    modes = {node.meta.get(MODE, ()) for node in nodes}
    return len(modes) == 1 and None not in modes


def _sets_mode(node: fx.Node) -> bool:
    """Whether a call neither has a value, which Dynamo notes of every operation, nor takes one."""
    return node.op == "call_function" and not any("example_value" in one.meta for one in (node, *node.all_input_nodes))
