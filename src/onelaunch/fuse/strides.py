"""Whether a value may have other strides than it was captured with: what uses it must compute the same and be possible."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from onelaunch.fuse.graph import is_of_torch, name_of, storages_of, tensor_of

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
        with result.fake_mode, torch.no_grad():
            columns = torch.cat([result, result], -1).split(result.shape[-1], -1)[0]
            return _compute_the_same({node: columns}, storages_of(node))
    except Exception:  # whatever PyTorch raises: a view that is not possible, a size that is not known
        return False


def _compute_the_same(values: dict[fx.Node, Any], memory: set[int]) -> bool:
    """Compute the users of `values`, and those of their views; whether all other results have the strides they had.

    What leaves the graph must have them too.
    """
    waiting = [user for node in values for user in node.users]
    while waiting and len(values) < MAX_USERS:
        user = waiting.pop(0)
        if user in values:
            continue
        if user.op == "output" or not is_of_torch(user) or READS_MEMORY.search(name_of(user)):
            return False
        if user.target is F.scaled_dot_product_attention:  # takes queries, keys and values of any strides
            continue
        args, kwargs = fx.node.map_arg(
            (user.args, dict(user.kwargs)), lambda one: values.get(one, one.meta.get("example_value"))
        )
        function: Any = getattr(torch.Tensor, name_of(user)) if user.op == "call_method" else user.target
        value = function(*args, **kwargs)
        if storages_of(user) & memory:
            values[user] = value
            waiting += user.users
        elif not _have_strides(value, user.meta.get("example_value")):
            return False
    return not waiting


def _have_strides(value: Any, captured: Any) -> bool:
    pairs = zip(*(torch.utils._pytree.tree_leaves(one) for one in (value, captured)), strict=True)
    tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
    return all(
        size == 1 or mine == theirs
        for one, two in tensors
        for size, mine, theirs in zip(one.shape, one.stride(), two.stride(), strict=True)
    )
