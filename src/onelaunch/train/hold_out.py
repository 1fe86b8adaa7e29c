"""`validation=0.1`: the rows that are held out of training. The seed chooses them; classes keep their proportions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onelaunch.errors import OnelaunchError
from onelaunch.rng import permutation

PIECE = 2**18  # rows that are looked at at once, so that millions of them need little memory
HOLD_OUT_EPOCH = 2**61  # the permutation of an epoch that no run reaches; also that of `onelaunch.data.split`


def hold_out(rows: int, fraction: float, seed: int, classes: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(training rows, held-out rows) as int64 indices in ascending order; round(rows * fraction) rows are held out.

    classes: int64 `[rows]` for a stratified choice: each class gives its share, rounded so that the sum is exact, and the first
    of its rows in the order of `permutation(rows, seed, 2**61)`. None chooses among all rows alike.
    """
    if not 0 < fraction < 1:
        raise OnelaunchError(f"validation={fraction} must be a fraction between 0 and 1, or a pair (x, y)")
    if rows < 2:
        raise OnelaunchError(
            f"validation={fraction} cannot hold rows out of {rows}: pass at least 2 rows, or a pair (x, y)"
        )
    count = held_out_count(rows, fraction)
    order = permutation(rows, seed, HOLD_OUT_EPOCH).numpy()
    held = np.zeros(rows, bool)
    if classes is None:
        held[order[:count]] = True
    else:
        labels = classes.cpu().numpy()
        quota = _quotas(np.bincount(labels), count)
        labels = labels.astype(np.uint16) if len(quota) <= 2**16 else labels  # NumPy sorts these by their digits
        for first in range(0, rows, PIECE):
            piece = order[first : first + PIECE]
            held[piece] = _first_of_each(labels[piece], quota)
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def held_out_count(rows: int, fraction: float) -> int:
    """The number of rows to hold out of `rows`: the fraction, rounded, and so that each part has at least one row."""
    return min(max(round(rows * fraction), 1), rows - 1)


def _quotas(sizes: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """The rows of each class to hold out, `count` in all: its share, and one more for the largest remainders."""
    exact = sizes * (count / sizes.sum())
    quotas = np.floor(exact).astype(np.int64)
    quotas[np.argsort(quotas - exact, kind="stable")[: count - quotas.sum()]] += 1
    return quotas


def _first_of_each(labels: np.ndarray[Any, Any], quota: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whether each of these rows is among the first `quota` of its class. Takes them off the quota."""
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=len(quota))
    position = np.empty(len(labels), np.int64)  # of each row within its class
    position[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = position < quota[labels]
    quota -= np.minimum(quota, sizes)
    return chosen
