"""Why a step has failed, in one line, where its inputs or the model's output are to blame."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelaunch.errors import (
    MAX_LINE,
    MAX_LONG_LINE,
    ArgumentTypeError,
    OnelaunchError,
    first_line,
    suggest,
    type_and_message,
)
from onelaunch.step.inputs import forward_arguments, own_loss, passed_by_name
from onelaunch.wrong_inputs import is_raised_by_model, require_known_names, require_possible

# What autograd says of compiled code that is to be differentiated twice.
UNDIFFERENTIATED = "double backward", "donated buffer", "differentiated Tensor", "does not require grad"


def explain_failure(
    error: Exception, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None, call_model: Callable[..., Any],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> None:  # fmt: skip
    """Raise OnelaunchError where the arguments of a step, or what the model returned, explain its `error`.

    Forward pass and loss run once more, not compiled, and leave no trace. `call_model` takes the model's `args` and `kwargs`.
    """
    if loss is not None and len(args) > 2 and "positional argument" in str(error):
        raise OnelaunchError(
            f"step has {len(args)} arguments: all but the last go to the model, {first_line(error)}; pass several targets "
            "as one tuple, as in step(x, (y, weight))"
        ) from error
    if isinstance(error, OnelaunchError) or isinstance(model, nn.parallel.DistributedDataParallel):
        return  # a single rank would wait for the others

    inputs, forward = args if loss is None else args[:-1], forward_arguments(model)
    in_model = True
    try:
        require_known_names("step", model, kwargs)
    except ArgumentTypeError as failure:
        hint = "" if loss is None else "; the target is the last argument, without a name"
        raise ArgumentTypeError(f"{failure}{hint}") from error

    def forward_and_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal in_model
        with torch.enable_grad():  # also of a model in evaluation mode
            output = call_model(args if loss is None else args[:-1], kwargs)
            in_model = False
            if loss is None:
                return own_loss(output)
            try:
                return loss(output, args[-1])
            except Exception as error:
                _require_tensor(output, error)
                raise

    try:
        require_possible("step", forward_and_loss, model, args, kwargs)
    except OnelaunchError as failure:
        if in_model and loss is None and len(args) > 1 and "positional argument" in str(error):
            raise OnelaunchError(f"{failure}; with loss=None all arguments go to the model, else pass loss=") from error
        if not in_model or len(inputs) != 1 or not isinstance(inputs[0], Mapping):
            raise
        if passed_by_name(inputs, forward, kwargs):
            why = "the dict was passed by name, as its keys are arguments of forward"
        else:
            other = next(key for key in inputs[0] if key not in forward.names)
            hint = suggest(other, forward.names)
            why = f"the dict was passed as one argument, as forward has no argument {other!r}{hint}"
        raise OnelaunchError(f"{failure}; {why}") from error


def require_scalar(loss: Any, has_function: bool) -> None:
    """Raise OnelaunchError for a loss that is not a 0-d tensor with gradients; without a function it is the model's own."""
    if not isinstance(loss, torch.Tensor) or loss.dim():
        what = f"has shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"is a {type(loss).__name__}"
        remedy = "return a 0-d tensor, as with reduction='mean'"
        if not has_function:
            remedy = "pass loss=, such as nn.CrossEntropyLoss(), or return the loss from forward"
        raise OnelaunchError(f"loss {what}: {remedy}")
    if not loss.requires_grad:
        raise OnelaunchError(
            "loss depends on no parameter that requires gradients: do not detach it, nor freeze the whole model"
        )


def compilers_failure(error: Exception) -> str:
    """What Dynamo or Inductor failed with: a bug of theirs, or a broken file in their cache. Empty for other errors.

    Compiled code is not differentiated twice, as a forward or a loss does that computes gradients. An error that says so is the
    compiler's if `explain_failure` has found that forward and loss succeed uncompiled.
    """
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return type_and_message(getattr(error, "inner_exception", error))
    twice = any(words in str(error) for words in UNDIFFERENTIATED)
    if isinstance(error, RuntimeError) and twice and not is_raised_by_model(error):
        return "the loss depends on gradients, which it does not differentiate"
    return ""


def recording_failure(error: Exception) -> str:
    """Why a step cannot be recorded: the first error, and the line of the model where it came up, if it did there."""
    first: BaseException = error
    while "previous error during capture" in str(first) and first.__context__ is not None:  # its end fails too
        first = first.__context__
    ours = [f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])]
    frames = [one for one in traceback.extract_tb(first.__traceback__) if not one.filename.startswith(tuple(ours))]
    place = ""
    if frames:
        line = f": {frames[-1].line}" if frames[-1].line else ""
        place = f", at {Path(frames[-1].filename).name}:{frames[-1].lineno}{line}"
    return first_line(first, MAX_LONG_LINE if isinstance(first, OnelaunchError) else MAX_LINE) + place


def _require_tensor(output: Any, error: Exception) -> None:
    """Raise OnelaunchError for an output of the model that is not a tensor, and with which the loss function has failed."""
    if isinstance(output, torch.Tensor):
        return
    if output is None:
        raise OnelaunchError("the model returned None, which has no loss: return its output from forward") from error
    key = repr(next(iter(output), "logits")) if isinstance(output, Mapping) else "0"
    raise OnelaunchError(
        f"the model returned a {type(output).__name__}, and loss raised {type_and_message(error)}: pass a function that "
        f"takes its tensors, as in loss=lambda output, target: nn.functional.cross_entropy(output[{key}], target)"
    ) from error
