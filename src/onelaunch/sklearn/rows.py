"""The rows of a fit with their weights, in a form that makes an integer weight and a repeated row the same thing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelaunch.errors import OnelaunchError

MAX_MERGED_ROWS = 1024


@dataclass(frozen=True)
class Rows:
    x: np.ndarray  # [rows, features]
    y: np.ndarray  # int64 [rows], or floats [rows, outputs]
    weight: np.ndarray | None  # float64 [rows], all above 0; None means the same for each
    total_weight: float


def make_rows(x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, *, in_order: bool = False) -> Rows:
    """The rows without those of weight 0. Up to 1,024 rows are sorted, and equal ones merged into one with their weight.

    in_order: leave all of them as they are, in their order.

    So small tables give the same bits in any order of their rows, and a row of weight 2 is the same as two equal rows. In
    larger ones, where batches are random parts of the table, that holds for the expectation only.
    Raises OnelaunchError if no row is left.
    """
    if weight is not None:
        kept = weight > 0
        if not kept.any():
            raise OnelaunchError("sample_weight has no value above 0: give at least one row a weight")
        x, y, weight = x[kept], y[kept], weight[kept]
    if len(x) <= MAX_MERGED_ROWS and not in_order:
        columns = np.column_stack([x, y]).astype(np.float64)
        _, first, place = np.unique(columns, axis=0, return_index=True, return_inverse=True)
        weight = np.bincount(place.ravel(), weight, minlength=len(first)).astype(np.float64)
        x, y = x[first], y[first]
    total = float(len(x) if weight is None else weight.sum())
    if weight is not None and (weight == weight[0]).all():
        weight = None
    return Rows(x, y, weight, total)


def to_float32(argument: str, values: np.ndarray, scaling: str) -> np.ndarray:
    """The finite `values` as float32; raises OnelaunchError if one of them is too large for it.

    scaling: the setting that scales them, for the message.
    """
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    finite = np.isfinite(found)
    if not finite.all():
        raise OnelaunchError(
            f"{argument} has the value {values[~finite][0]:.3g}, too large for float32: scale it down, or leave {scaling}"
        )
    return found


def fits_float32(values: np.ndarray) -> bool:
    """Whether float32 holds numbers of the size of the largest of these, and a billion times smaller or larger ones."""
    largest = float(np.abs(values).max())
    return largest == 0 or 1e-28 < largest < 1e28
