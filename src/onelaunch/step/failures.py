"""Why a step has failed, in one line, where its inputs or the model's output are to blame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from onelaunch.errors import OnelaunchError, first_line, type_and_message
from onelaunch.step.inputs import own_loss, parameter_names, passed_by_name
from onelaunch.wrong_inputs import require_possible


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

    inputs = args if loss is None else args[:-1]
    in_model = True

    def forward_and_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal in_model
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
        if not in_model or not passed_by_name(inputs, parameter_names(model)):
            raise
        raise OnelaunchError(f"{failure}; the dict was passed by name, as its keys are arguments of forward") from error


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
