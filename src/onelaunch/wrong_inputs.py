"""Inputs that a model cannot take, said in one line: PyTorch's own message, and the shapes and types that were passed.

A compiler's message about such inputs is dozens of lines long. So the same function runs once more without a compiler, and the
first line of what PyTorch then says is shown.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate_list, first_line, is_out_of_memory, suggest
from onelaunch.trial_runs import copied, restored, trial_mode

PYTORCHS = (
    RuntimeError,
    TypeError,
    ValueError,
    IndexError,
)  # what its functions raise for wrong shapes, types and labels


def require_no_class(loss: Any) -> None:
    """Raise ArgumentTypeError for a class as loss, such as nn.CrossEntropyLoss without parentheses."""
    if isinstance(loss, type):
        name: str = loss.__name__
        name = f"nn.{name}" if getattr(nn, name, None) is loss else name
        raise ArgumentTypeError(f"loss={name} is a class, not a function of (output, target): pass {name}()")


def require_known_names(caller: str, model: nn.Module, names: Mapping[str, Any]) -> None:
    """Raise ArgumentTypeError for a named input that the model's forward does not have, such as a misspelt option."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except ValueError:  # a forward in C has no signature
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in names:
        if name not in parameters:
            known = f"{type(model).__name__}.forward has {abbreviate_list(list(parameters)) or 'no arguments'}"
            hint = suggest(name, parameters)
            raise ArgumentTypeError(f"{caller} has no argument {name!r}, nor has the model: {known}{hint}")


def require_possible(
    caller: str, function: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run `function`, which is not compiled, once on copies of its inputs, and leave no trace in `model`.

    Raises OnelaunchError with the inputs and the first line of PyTorch's message where it fails.
    """
    mine, mine_by_name = copied((args, kwargs))
    try:
        with restored(model), trial_mode(model, args, kwargs):
            function(*mine, **mine_by_name)
    except Exception as error:
        if type(error) not in PYTORCHS or is_out_of_memory(error) or is_raised_by_model(error):
            raise
        given = ", ".join(
            [*map(describe_input, args), *(f"{name}={describe_input(value)}" for name, value in kwargs.items())]
        )
        leaves = tree_leaves((args, kwargs))
        arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves)
        shapes = args and all(map(_is_shape, args)) and not any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        others = "arrays" if arrays else "shapes" if shapes else ""
        tensors = f", and pass tensors instead of {others}" if others else ""
        said = first_line(error).rstrip(".")
        raise OnelaunchError(
            f"{caller}({given}) is not possible: {said}: {_remedy(said, model, caller)}{tensors}"
        ) from error


def _remedy(said: str, model: nn.Module, caller: str) -> str:
    if "does not require grad" in said and not model.training and caller != "step":
        return f"evaluation runs without gradients here, which {type(model).__name__} computes: call its train() first"
    if "device" in said:
        return "move the model and its inputs to one device, as in x.to(device)"
    return "check these shapes, types and values"


def is_raised_by_model(error: Exception) -> bool:
    """Whether a `raise` outside of PyTorch made it: the model's own message, which its callers may expect."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or Path(place.tb_frame.f_code.co_filename).is_relative_to(Path(torch.__file__).parent):
        return False
    return dis.opname[place.tb_frame.f_code.co_code[place.tb_lasti]] == "RAISE_VARARGS"


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(type(size) is int for size in value)


def describe_input(value: Any) -> str:
    """`float32[12, 8]` for a tensor, `ndarray float32[12, 8]` for an array, a shape, the name of its type for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, np.ndarray):
        return f"ndarray {value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {describe_input(inner)}" for name, inner in value.items()) + "}"
    return str(tuple(value)) if _is_shape(value) else type(value).__name__
