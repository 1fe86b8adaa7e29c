"""Whether a value may have other strides than it was captured with: what uses it must compute the same and be possible."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from onelaunch.fuse.graph import name_of, tensor_of
from onelaunch.fuse.memory import is_of_torch, memory_of, memory_written_by, storages_of
from onelaunch.loggers import logging_from

READS_MEMORY = re.compile("strid|storage|data_ptr|contiguous_|is_contiguous|dlpack|nested|_data_attr|resize|numpy")
MAX_USERS = 200  # of one value and its views
SLICED = "onelaunch_sliced"  # the key of a node's metadata that holds the answer


def may_be_sliced(node: fx.Node) -> bool:
    """Whether `node` may be some columns of a wider tensor instead of a contiguous one of its own."""
    if SLICED not in node.meta:
        node.meta[SLICED] = _may_be_sliced(node)
    return bool(node.meta[SLICED])


def _may_be_sliced(node: fx.Node) -> bool:
    result = tensor_of(node)
    if not isinstance(result, FakeTensor) or not result.is_contiguous():
        return False
    try:
        with result.fake_mode, torch.no_grad(), _without_messages():
            # Neither their first value nor the rows' distance is a multiple of 2, as views of pairs of values need.
            width = result.shape[-1]
            around = result[..., :1], result[..., : 2 - width % 2]
            columns = torch.cat([around[0], result, around[1]], -1).narrow(-1, 1, width)
            return _compute_the_same(node, columns, storages_of(node) | memory_of([columns]))
    except Exception:  # whatever PyTorch raises: a view that is not possible, a size that is not known
        return False


def _compute_the_same(node: fx.Node, columns: torch.Tensor, memory: set[int]) -> bool:
    """Compute the users of `node` with `columns` as its value, and those of its views; whether all other results have the
    strides they had.

    What leaves the graph must have them too, and nothing may be changed in place: a view might have become a copy. `memory` is
    that of the node and of the columns.
    """
    values: dict[fx.Node, Any] = {node: columns}
    waiting = set(node.users)
    while waiting and len(values) < MAX_USERS:
        node = node.next  # in the graph's order, so that every argument has its new value
        if node not in waiting:
            continue
        waiting.remove(node)
        if node.op == "output" or not is_of_torch(node) or READS_MEMORY.search(name_of(node)):
            return False
        if memory_written_by(node) & memory:
            return False
        if free_unbacked_symbols(node.meta.get("example_value")):  # computing it again would make new symbols
            return False
        if node.target is F.scaled_dot_product_attention:  # takes queries, keys and values of any strides
            continue
        args, kwargs = fx.node.map_arg(
            (node.args, dict(node.kwargs)), lambda one: values.get(one, one.meta.get("example_value"))
        )
        function: Any = getattr(torch.Tensor, name_of(node)) if node.op == "call_method" else node.target
        value = function(*args, **kwargs)
        captured = storages_of(node)
        made = memory_of(one for one in torch.utils._pytree.tree_leaves(value) if isinstance(one, torch.Tensor))
        if (captured | made) & memory:  # a view, or a dropout that drops nothing and returns its input
            values[node] = value
            memory |= captured
            waiting.update(node.users)
        elif not _have_strides(value, node.meta.get("example_value")):
            return False
    return not waiting


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """PyTorch logs a view that is not possible as an error; warnings of operations have been given when they were captured."""
    with logging_from(logging.CRITICAL, "torch._subclasses.fake_tensor"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _have_strides(value: Any, captured: Any) -> bool:
    pairs = zip(*(torch.utils._pytree.tree_leaves(one) for one in (value, captured)), strict=True)
    tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
    return all(
        size == 1 or mine == theirs
        for one, two in tensors
        for size, mine, theirs in zip(one.shape, one.stride(), two.stride(), strict=True)
    )
