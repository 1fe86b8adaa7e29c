"""`ol.predict`: a model's outputs for arrays, with the preprocessing of `fit`, in batches on the model's device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.errors import ArgumentTypeError, OnelaunchError, first_line, require_integer
from onelaunch.run.objective import own_features
from onelaunch.train.argument_names import advise
from onelaunch.train.arrays import check_finite, to_tensor
from onelaunch.trial_runs import evaluation

TASK = "_onelaunch_task"  # the attribute of a model that `fit` has trained; copies and pickles of the model keep it
BATCH_VALUES = 2**22  # input values per batch, where the user names no batch size
PREDICTED_ROWS = 8192  # per batch of `float64_outputs`
MAX_SCALED = 2.0  # above this, floats are not value / 255
SEEN_ROWS = 1024  # of which `fit` remembers the largest value


@dataclass(frozen=True)
class Task:
    """What `fit` has trained a model for."""

    loss: str
    classes: tuple[str, ...] | None  # names by number, where y had names
    flat: bool  # y had one value per row and no second dimension
    uint8_rows: bool
    float_rows: bool = False  # rows of other integers were trained on as floats
    largest: float = 0.0  # of the first rows, where they were floats


def remember_task(run: Run, *, flat: bool) -> None:
    """Note on the model what it is being trained for, so that `predict` can turn its outputs into predictions."""
    floats = run.x.is_floating_point()
    largest = float(run.x[:SEEN_ROWS].max()) if floats and run.x.numel() else 0.0
    setattr(run.model, TASK, Task(run.spec.loss, run.classes, flat, run.x.dtype == torch.uint8, floats, largest))


@advise({"verbose": "not needed: predict prints nothing", "proba": "probabilities=True"})
def predict(
    model: nn.Module, x: Any, *, batch_size: int | None = None, probabilities: bool = False
) -> np.ndarray[Any, Any]:
    """The model's predictions for the rows of x, which are prepared as in `fit`: uint8 means value / 255.

    x: an array, a tensor or nested lists, or a tuple of them for a model with several inputs.
    For a model that `fit` has trained, the loss decides what a prediction is:
      cross_entropy     class numbers `[rows]`, or class names if y had names; probabilities: `[rows, classes]`
      bce_with_logits   0 or 1 (class names if y had names) in the shape of y; probabilities: those of 1, in the same shape
      mse               values in the shape of y
    For any other model, the outputs as they are; probabilities: their softmax over dimension 1, or sigmoid of one output.
    batch_size: rows per forward pass; None chooses by the size of a row.
    The model runs in evaluation mode on its own device, and its mode is restored. Raises OnelaunchError for a mistake.
    """
    if not isinstance(model, nn.Module):
        remedy = "call its own predict(x)" if hasattr(model, "predict") else "pass the model that fit has trained"
        raise ArgumentTypeError(f"model={model!r:.80} is not an nn.Module: {remedy}")
    if not isinstance(probabilities, bool):
        raise ArgumentTypeError(f"probabilities={probabilities!r:.60} must be True or False")
    inputs = tuple(to_tensor("x", part) for part in (x if isinstance(x, tuple) else (x,)))
    if len({len(part) for part in inputs}) > 1:
        raise OnelaunchError(
            f"x has inputs of {', '.join(str(len(part)) for part in inputs)} rows: pass the same number"
        )
    task: Task | None = getattr(model, TASK, None)
    for part in inputs if task else ():  # another model may know what to do with NaN
        check_finite("x", part)
    if task and task.float_rows:
        inputs = (_as_trained(inputs[0], task), *inputs[1:])
    if task and task.uint8_rows and inputs[0].is_floating_point() and inputs[0].numel():
        largest = float(inputs[0].max())
        if largest > MAX_SCALED:
            raise OnelaunchError(
                f"x is {inputs[0].dtype} with values up to {largest:.4g}, but the model was trained on uint8 rows, which mean "
                "value / 255: pass uint8 rows, or x / 255"
            )
    rows = len(inputs[0])
    if batch_size is None:
        values = sum(part[0].numel() for part in inputs) if rows else 1
        batch_size = max(64, min(16384, BATCH_VALUES // max(1, values)))
    elif (batch_size := require_integer("batch_size", batch_size, "a number of rows, or None")) < 1:
        raise OnelaunchError(f"batch_size={batch_size} must be 1 or more")
    if not rows:
        raise OnelaunchError("x is empty: pass at least one row")
    outputs = outputs_of(model, inputs, batch_size)
    return _probabilities(outputs, task) if probabilities else _predictions(outputs, task)


def _as_trained(x: torch.Tensor, task: Task) -> torch.Tensor:
    """Rows for a model that was trained on floats: other integers were converted; uint8 is refused if it was not scaled."""
    if x.dtype != torch.uint8:
        return x if x.is_floating_point() else x.float()
    if task.largest > MAX_SCALED and x.numel() and int(x.max()) > MAX_SCALED:
        raise OnelaunchError(
            f"x is uint8, which means value / 255, but the model was trained on floats up to {task.largest:.4g}: "
            "pass x.astype('float32')"
        )
    return x


def outputs_of(model: nn.Module, inputs: tuple[torch.Tensor, ...], batch_size: int) -> torch.Tensor:
    """The model's outputs for all rows in evaluation mode, on the CPU; raises OnelaunchError if it cannot take them."""
    parameter = next(model.parameters(), torch.empty(0))
    outputs: list[torch.Tensor] = []
    with evaluation(model):
        for first in range(0, len(inputs[0]), batch_size):
            batch = [
                own_features(part[first : first + batch_size].to(parameter.device), parameter.dtype) for part in inputs
            ]
            try:
                output = model(*batch)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                shapes = ", ".join(str(tuple(part.shape[1:])) for part in inputs)
                linear = next((module for module in model.modules() if isinstance(module, nn.Linear)), None)
                reason = first_line(error)
                if linear is not None and inputs[0].ndim == 2 and inputs[0].shape[1] != linear.in_features:
                    reason = f"its first Linear takes {linear.in_features} values per row"
                raise OnelaunchError(f"model cannot take x with rows of shape {shapes}: {reason}") from error
            if not isinstance(output, torch.Tensor) or len(output) != len(batch[0]):
                raise OnelaunchError(
                    "model must return one tensor with one row per sample: for a single row pass x[None]"
                )
            outputs.append(output.cpu())
    return torch.cat(outputs)


def float64_outputs(model: nn.Module, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The outputs for the rows x, float64 [rows, …], from a float64 copy of the model on the CPU.

    In float64 a row's outputs do not depend on the batch it is in, up to 1e-15.
    """
    network = copy.deepcopy(model).to("cpu", torch.float64)
    return outputs_of(network, (to_tensor("x", x),), PREDICTED_ROWS).numpy()


def _predictions(outputs: torch.Tensor, task: Task | None) -> np.ndarray[Any, Any]:
    if task is None or task.loss not in ("cross_entropy", "bce_with_logits"):
        return _in_the_shape_of_y(outputs, task)
    if task.loss == "cross_entropy":
        numbers = outputs.argmax(dim=1)
    else:
        numbers = (outputs > 0).to(torch.int64)
        numbers = numbers.flatten() if task.flat or task.classes else numbers
    return numbers.numpy() if task.classes is None else np.array(task.classes)[numbers.numpy()]


def _probabilities(outputs: torch.Tensor, task: Task | None) -> np.ndarray[Any, Any]:
    if task and task.loss not in ("cross_entropy", "bce_with_logits"):
        raise OnelaunchError(f"probabilities=True: a model trained with loss={task.loss!r} has none; pass False")
    several = task.loss == "cross_entropy" if task else outputs[0].numel() > 1
    if several:
        return _array(outputs.float().softmax(dim=1))
    return _in_the_shape_of_y(outputs.float().sigmoid(), task)


def _in_the_shape_of_y(outputs: torch.Tensor, task: Task | None) -> np.ndarray[Any, Any]:
    return _array(outputs.flatten() if task and task.flat and outputs[0].numel() == 1 else outputs)


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy()
