"""What a step is called with and what a model returns: the inputs of a recording, their signature, the loss, its parameters."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_unflatten

from onelaunch.errors import OnelaunchError
from onelaunch.fuse.captured import loss_in
from onelaunch.trial_runs import copied

CONSTANTS = (
    int, float, complex, np.generic, str, bytes, NoneType, Enum, FunctionType, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
COMPARED = (*CONSTANTS, tuple)


class Pending:
    """Inputs in memory of our own, for the steps before a recording and for the recording itself.

    A compiled function may depend on more than shapes, such as which arguments are the same tensor. So the recording gets the
    very tensors that the steps before it were compiled for.
    """

    def __init__(self, leaves: list[Any], structure: Any, device: torch.device) -> None:
        self.leaves = copied(leaves, device)
        self.inputs = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        self.args, self.kwargs = tree_unflatten(self.leaves, structure)
        self.calls = 0
        self.changed_by_forward = False  # what forward reads, when it was recorded
        self.loss = torch.empty(())

    def fill(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for static, given in zip(self.inputs, tensors, strict=True):
                static.copy_(given)


def mark_rows_dynamic(*inputs: Any) -> None:
    """Have Dynamo compile for any number of rows: else the last batch of an epoch would compile again.

    In every call: what forward changes, such as an attribute, may have it compile again.
    """
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            torch._dynamo.maybe_mark_dynamic(leaf, 0)


class ForwardArguments(NamedTuple):
    """The arguments of a model's forward."""

    names: frozenset[str] = frozenset()  # of those that may be given by name
    required: frozenset[str] = frozenset()  # those without a default
    takes_others: bool = False  # by `**kwargs`
    takes_positional: bool = True


def forward_arguments(model: nn.Module) -> ForwardArguments:
    try:
        parameters = inspect.signature(_inner(model).forward).parameters.values()
    except ValueError:  # a scripted forward has no signature
        return ForwardArguments()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    single = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return ForwardArguments(
        names=frozenset(each.name for each in named),
        required=frozenset(each.name for each in single if each.default is each.empty),
        takes_others=any(each.kind is each.VAR_KEYWORD for each in parameters),
        takes_positional=any(each.kind not in (each.KEYWORD_ONLY, each.VAR_KEYWORD) for each in parameters),
    )


def passed_by_name(inputs: tuple[Any, ...], forward: ForwardArguments, others: Iterable[str] = ()) -> bool:
    """Whether the only positional input is a dict whose keys are arguments of forward; `others` are given by name anyway.

    A forward with `**kwargs` may take some of them so, unless an argument is missing: that forward may want the dict itself.
    """
    if len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        return False
    keys = set(inputs[0])
    if keys <= forward.names:
        return True
    if not forward.takes_others or not forward.required <= keys.union(others):
        return False
    return all(isinstance(key, str) for key in keys) and bool(keys & forward.names or not forward.takes_positional)


def _inner(model: nn.Module) -> nn.Module:
    """The module within wrappers whose forward takes what that of the module takes."""
    wraps = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel))
    inner = dict(model.named_children()).get("module" if wraps else "_orig_mod")  # the latter of `torch.compile`
    return model if inner is None else _inner(inner)


def own_loss(output: Any) -> torch.Tensor:
    """The loss within what a model returned."""
    if isinstance(output, torch.Tensor):
        return output
    loss = loss_in(output)
    if loss is None:
        raise OnelaunchError(
            f"loss=None, but the model returned a {type(output).__name__} without a loss: pass loss=, or what the model needs "
            "to compute one, such as labels"
        )
    return loss


def differentiated_parameters(loss: torch.Tensor) -> Iterator[nn.Parameter]:
    """The parameters that a backward pass from `loss` gives gradients, also those that the loss function has by itself."""
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a node that adds to a leaf's gradient
        if isinstance(variable, nn.Parameter):
            yield variable
        waiting += [source for source, _ in node.next_functions]


@contextmanager
def other_gradients_kept(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """For parameters that are not the optimizer's: a recording would add to memory that their owner may release."""
    own = {*map(id, parameters)}
    others = {one: one.grad for one in differentiated_parameters(loss) if id(one) not in own}
    for parameter in others:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in others.items():
            parameter.grad = gradient


def are_same_objects(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two settings are equal. Tensors and objects are equal only to themselves."""
    if one is other:
        return True
    if not issubclass(type(one), COMPARED) or not issubclass(type(other), COMPARED):
        return False
    try:
        return bool(one == other) or bool(one != one and other != other)  # NaN
    except (RuntimeError, ValueError):  # of tensors or arrays inside
        return False


def signature(leaf: Any) -> Any:
    """What a recording depends on: shape and type of a tensor, the value of a constant; of another object only its type."""
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.dtype, leaf.layout, leaf.requires_grad
    if isinstance(leaf, float):
        return float, repr(leaf)  # -0.0 equals 0.0, and NaN not even itself
    return (type(leaf), leaf) if isinstance(leaf, CONSTANTS) else type(leaf)  # 0 equals False
