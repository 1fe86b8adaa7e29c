"""What kind of call a graph is for: which arguments are constants, part of it, and which are its inputs."""

from __future__ import annotations

import inspect
import types
from dataclasses import dataclass
from typing import Any

import torch

CONSTANTS = (bool, int, float, str, types.NoneType, torch.dtype, torch.device)


@dataclass(frozen=True)
class Arguments:
    """How a call's arguments divide into constants, part of the trace, and tensors (or anything else), its inputs."""

    positional: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return cls(tuple(map(_kind, args)), tuple((name, _kind(value)) for name, value in kwargs.items()))

    @classmethod
    def required_by(cls, forward: Any) -> Arguments:
        """What a call will most likely pass: an input for each parameter without a default, and one if all have one."""
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [one for one in parameters if one.kind in plain and one.default is inspect.Parameter.empty]
        positional = (*plain, inspect.Parameter.VAR_POSITIONAL)
        least = 1 if any(one.kind in positional for one in parameters) else 0
        return cls((INPUT,) * max(len(required), least), ())


class _Input:
    def __repr__(self) -> str:
        return "input"


INPUT = _Input()


def _kind(value: Any) -> Any:
    # The type is part of a constant: 1, 1.0 and True are equal and hash alike.
    return (type(value), value) if isinstance(value, CONSTANTS) else INPUT


def inputs_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values that take the places of the graph's placeholders."""
    return [value for value in (*args, *kwargs.values()) if not isinstance(value, CONSTANTS)]
