"""Tensors from what users pass as rows and targets, and the checks that every function of level 3 makes on them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch

from onelaunch.errors import ArgumentTypeError, OnelaunchError

CHECKED_VALUES = 2**24  # values per piece of the check for NaN


def to_tensor(argument: str, value: Any) -> torch.Tensor:
    """A dense tensor of real numbers from a tensor, an array or nested lists, without a copy if none is needed."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
            raise OnelaunchError(f"{argument} is a masked array with masked values: fill in or drop such rows")
        try:
            array = np.asarray(value)
        except ValueError:
            raise ArgumentTypeError(f"{argument} has rows of different lengths: pass a rectangular array") from None
        except (RuntimeError, TypeError) as error:
            raise ArgumentTypeError(f"{argument} cannot become an array ({error}): pass an array or a tensor") from None
        if array.dtype.kind not in "buif":
            array = _numbers(argument, value, array)
        if array.dtype in (np.uint16, np.uint32, np.uint64):
            array = array.astype(np.int64)
        if array.dtype == np.longdouble:
            array = array.astype(np.float64)
        # PyTorch cannot take negative strides or a foreign byte order.
        if any(stride < 0 for stride in array.strides) or not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="), copy=True)
        with (
            warnings.catch_warnings()
        ):  # PyTorch warns about read-only memory, such as a memory-mapped file; we only read
            warnings.simplefilter("ignore", UserWarning)
            value = torch.from_numpy(array)
    if value.layout != torch.strided or value.is_complex() or value.is_nested or value.is_meta or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        what = f"{kind} {value.dtype} on {value.device}"
        raise ArgumentTypeError(f"{argument} must be a dense tensor of real numbers, not {what}")
    if value.ndim == 0:
        raise OnelaunchError(f"{argument} is a single number: pass one row per sample")
    return value.detach()


def _numbers(argument: str, value: Any, array: Any) -> Any:
    """An array of numbers from what NumPy has made one of objects, such as pandas' nullable columns; or ArgumentTypeError."""
    if value is None:
        raise ArgumentTypeError(f"{argument} is None: pass one row per sample")
    if hasattr(value, "toarray"):
        raise ArgumentTypeError(f"{argument} is a sparse {type(value).__name__}: pass {argument}.toarray()")
    others = _columns_without_numbers(value)
    if others:
        name, kind = others[0]
        remedy = "onelaunch.sklearn.TableEncoder makes them from a table"
        raise ArgumentTypeError(
            f"{argument} has {kind} in column {name!r}: pass numbers (float, integer or uint8): {remedy}"
        )
    if hasattr(value, "to_numpy") and (hasattr(value, "columns") or value.dtype.kind in "buif"):
        return value.to_numpy(np.float64, na_value=np.nan)
    if array.dtype == object and array.size and all(isinstance(entry, int | float | np.number) for entry in array.flat):
        return array.astype(np.float64)
    raise ArgumentTypeError(f"{argument} has dtype {array.dtype}: pass numbers (float, integer or uint8)")


def _columns_without_numbers(value: Any) -> list[tuple[str, str]]:
    """The names of the columns of a DataFrame that are not numbers, and what they hold; empty for anything else."""
    kinds = [(str(name), getattr(value[name].dtype, "kind", "O")) for name in getattr(value, "columns", ())]
    return [(name, "dates" if kind in "mM" else "text") for name, kind in kinds if kind not in "buif"]


def check_lengths(x_name: str, x: torch.Tensor, y_name: str, y: torch.Tensor) -> None:
    if len(x) != len(y):
        raise OnelaunchError(f"{x_name} has {len(x)} rows and {y_name} has {len(y)}: pass the same number of rows")
    if len(x) == 0:
        raise OnelaunchError(f"{x_name} is empty: pass at least one row")


def check_finite(argument: str, x: torch.Tensor) -> None:
    """Raise OnelaunchError for floating-point rows that hold NaN or an infinity."""
    if x.is_floating_point() and (row := first_row_not_finite(x)) is not None:
        raise OnelaunchError(
            f"{argument} holds NaN or Inf (first in row {row}), or numbers too large for {x.dtype}: fill in or drop such rows"
        )


def first_row_not_finite(x: torch.Tensor) -> int | None:
    """The first row with NaN or an infinity, or None. Reads x once, in pieces, and allocates little."""
    values = max(1, x[0].numel()) if len(x) else 1
    for first in range(0, len(x), rows := max(1, CHECKED_VALUES // values)):
        part = x[first : first + rows]
        if math.isfinite(part.sum().item()):  # a sum of finite values may overflow: then each value is looked at
            continue
        finite = torch.isfinite(part)
        if not finite.all():
            return first + int((~finite).nonzero()[0, 0])
    return None
