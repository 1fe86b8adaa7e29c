"""The targets of `fit`: class numbers, class names, one-hot rows or values, as the tensor that the engines take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, abbreviate_list, suggest
from onelaunch.run.options import CUSTOM_LOSS
from onelaunch.run.spec import Spec

Names = tuple[str, ...]


def encode(argument: str, y: Any, known: Names | None = None) -> tuple[Any, Names | None]:
    """y with strings replaced by class numbers, and the sorted class names; other y as it is, and None.

    `known`: the names of the training rows, for validation targets. Raises OnelaunchError for a name that is not among them.
    """
    if isinstance(y, torch.Tensor) or not hasattr(y, "__len__"):
        return y, None
    array = np.asarray(y) if not isinstance(y, list) or any(isinstance(label, str) for label in y[:1]) else None
    if array is None or array.dtype.kind not in "OUST" or array.ndim not in (1, 2) or array.size == 0:
        return y, None
    if array.dtype == object and all(isinstance(label, int | float | np.number | np.bool_) for label in array.flat):
        return np.array(array.tolist()), None
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or not all(isinstance(label, str | np.str_) for label in array):
        wrong = next((label for label in array.flat if not isinstance(label, str | np.str_)), "rows of several names")
        raise ArgumentTypeError(
            f"{argument} holds {abbreviate(wrong)}: pass class names alone, or numbers alone, one per row"
        )
    array = array.astype(np.str_)
    names = np.array(known) if known is not None else np.unique(array)
    index = np.minimum(np.searchsorted(names, array), len(names) - 1)
    wrong_rows = np.flatnonzero(names[index] != array)
    if len(wrong_rows):
        label = str(array[wrong_rows[0]])
        raise OnelaunchError(
            f"{argument}[{wrong_rows[0]}]={label!r} is not a class of y, which has {abbreviate_list(names.tolist())}"
            f"{suggest(label, names.tolist())}"
        )
    return index.astype(np.int64), tuple(names.tolist())


def targets_of(
    argument: str, y: torch.Tensor, spec: Spec, output: tuple[int, ...], dtype: torch.dtype, names: Names | None
) -> torch.Tensor:
    """y as the engines take it (see Run), checked against the loss and the shape of an output row."""
    if spec.loss == "cross_entropy":
        return _classes(argument, y, output[0], names)
    if spec.loss == CUSTOM_LOSS:  # what the user's function takes
        return (y.to(dtype) if y.is_floating_point() else y).contiguous()
    if names is not None and (spec.loss == "mse" or len(names) > 2 or int(np.prod(output)) != 1):
        remedy = "pass numbers" if spec.loss == "mse" else "pass loss='cross_entropy' and one output per class"
        raise OnelaunchError(f"{argument} holds class names, which loss={spec.loss!r} does not take here: {remedy}")
    y, given = y.to(dtype), y
    finite = torch.isfinite(y)
    if not finite.all():
        row = int((~finite).nonzero()[0, 0])
        if torch.isfinite(given).all():
            largest = given[~finite][0].item()
            raise OnelaunchError(
                f"{argument} has the value {largest:.3g} in row {row}, too large for {dtype}: scale it down"
            )
        raise OnelaunchError(f"{argument} holds NaN or Inf (first in row {row}): fill in or drop such rows")
    if tuple(y.shape[1:]) != output:
        if y[0].numel() != (values := int(np.prod(output))):
            difference = f"has {y[0].numel()} values per row, the model's output has {values}"
            raise OnelaunchError(f"{argument} {difference}: make the two equal")
        if y.ndim > 2 and [size for size in y.shape[1:] if size != 1] != [size for size in output if size != 1]:
            difference = f"has rows of shape {tuple(y.shape[1:])}, the model's output has {output}"
            raise OnelaunchError(f"{argument} {difference}: pass the same shape, or flat rows")
        y = y.reshape(len(y), *output)
    if spec.loss == "bce_with_logits" and not ((y >= 0) & (y <= 1)).all():
        raise OnelaunchError(f"{argument} must be in [0, 1] for loss='bce_with_logits' (got {y.min()} to {y.max()})")
    return y.contiguous()


def _classes(argument: str, y: torch.Tensor, classes: int, names: Names | None) -> torch.Tensor:
    if names is not None and len(names) > classes:
        has = f"has {len(names)} classes ({abbreviate_list(names)})"
        raise OnelaunchError(f"{argument} {has}, the model {classes} outputs: give it one output per class")
    if y.ndim == 2 and y.shape[1] == classes > 1:
        y = _from_one_hot(argument, y)
    if y.is_floating_point():
        whole = bool((y == y.round()).all())
        remedy = f"{argument}.astype(int)" if whole else f"{argument} as integers"
        raise ArgumentTypeError(
            f"{argument} is {y.dtype}, loss='cross_entropy' takes class numbers: pass {remedy}, or loss='mse' for regression"
        )
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise OnelaunchError(f"{argument} has shape {list(y.shape)}: loss='cross_entropy' takes one class per row")
    y = y.to(torch.int64)
    if int(y.min()) < 0 or int(y.max()) >= classes:
        row = int(((y < 0) | (y >= classes)).nonzero()[0, 0])
        known = f"its {classes} outputs take 0 to {classes - 1}"
        known += f"; pass {argument} - 1" if int(y.min()) == 1 and int(y.max()) == classes > 1 else ""
        if classes == 1:
            known = "it has one output; pass loss='bce_with_logits', or a model with an output per class"
        raise OnelaunchError(f"{argument}[{row}]={int(y[row])} is not a class of this model: {known}")
    return y.contiguous()


def _from_one_hot(argument: str, y: torch.Tensor) -> torch.Tensor:
    """The class numbers of one-hot rows `[rows, classes]`; raises OnelaunchError if a row is not one-hot."""
    one_hot = (((y == 0) | (y == 1)).all(dim=1)) & ((y == 1).sum(dim=1) == 1)
    if not one_hot.all():
        row = int((~one_hot).nonzero()[0, 0])
        raise OnelaunchError(
            f"{argument} has {y.shape[1]} values per row, and row {row} is not one-hot: pass class numbers for "
            "loss='cross_entropy', or loss='bce_with_logits' for several classes per row"
        )
    return y.to(torch.int8).argmax(dim=1)
