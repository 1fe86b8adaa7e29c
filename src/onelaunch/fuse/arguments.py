"""What kind of call a graph is for: which arguments are constants, part of it, and which are its inputs."""

from __future__ import annotations

import inspect
import math
import types
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

CONSTANTS = (bool, int, float, str, types.NoneType, torch.dtype, torch.device)
DEEPEST = 8  # containers in containers; what lies deeper is passed on as it is


@dataclass(frozen=True)
class Arguments:
    """How a call's arguments divide into constants, part of the trace, and tensors (or anything else), its inputs.

    An input is the number of the first place it is at: a tensor that is passed twice is one input. Lists, tuples and
    dictionaries are taken apart: what is None in them is part of the trace too.
    """

    positional: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        inputs: dict[int, tuple[int, Any]] = {}
        positional = tuple([_kind(value, inputs) for value in args])
        return cls(positional, tuple([(name, _kind(value, inputs)) for name, value in kwargs.items()]))

    @classmethod
    def required_by(cls, forward: Any) -> Arguments:
        """What a call will most likely pass: a tensor for each parameter without a default, and one if all have one."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [one for one in parameters if one.kind in plain and one.default is inspect.Parameter.empty]
        positional = (*plain, inspect.Parameter.VAR_POSITIONAL)
        least = 1 if any(one.kind in positional for one in parameters) else 0
        return cls(tuple(range(max(len(required), least))), ())


@dataclass(frozen=True)
class Thing:
    """An input that is no tensor: a graph may pass it on, but not look into it."""

    index: int
    type: type


def _kind(value: Any, inputs: dict[int, tuple[int, Any]], depth: int = 0) -> Any:
    """What a trace is told of an argument; an input is added to `inputs`, by its identity, with its number."""
    if isinstance(value, CONSTANTS):
        # The type is part of a constant: 1, 1.0 and True are equal and hash alike. So are 0.0 and -0.0.
        constant = (type(value), value)
        return (*constant, math.copysign(1, value)) if isinstance(value, float) and value == 0 else constant
    kind = type(value)
    if (kind is list or kind is tuple) and depth < DEEPEST:
        return kind, tuple([_kind(item, inputs, depth + 1) for item in value])
    if kind is dict and depth < DEEPEST:
        return kind, tuple(value), tuple([_kind(item, inputs, depth + 1) for item in value.values()])
    index = inputs.setdefault(id(value), (len(inputs), value))[0]
    return index if isinstance(value, (torch.Tensor, fx.Proxy)) else Thing(index, kind)


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values that take the places of the graph's placeholders."""
    inputs: dict[int, tuple[int, Any]] = {}
    for value in (*args, *kwargs.values()):
        _kind(value, inputs)
    return [value for _, value in inputs.values()]
