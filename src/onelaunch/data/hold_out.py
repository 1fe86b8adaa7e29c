"""Which rows are held out of training: the seed chooses them, and classes keep their proportions."""

from __future__ import annotations

from typing import Any

import numpy as np

from onelaunch.rng import permutation

Array = np.ndarray[Any, Any]
PIECE = 2**18  # rows that are looked at at once, so that millions of them need little memory
HOLD_OUT_EPOCH = 2**61  # the permutation of an epoch that no run reaches


def held_out_count(rows: int, fraction: float) -> int:
    """The number of rows to hold out of `rows`: the fraction, rounded, and so that each part has at least one row."""
    return min(max(round(rows * fraction), 1), rows - 1)


def held_out_mask(order: Array, fraction: float, classes: Array | None = None, *, keep_one: bool = False) -> Array:
    """Whether each row is held out, bool `[rows]`. The first rows in `order`, a permutation of the rows, are held out.

    classes: int64 `[rows]` for a stratified choice: each class gives its share, rounded so that the sum is exact.
    keep_one: whether one row of each class stays in training at least, where there are rows enough.
    """
    rows = len(order)
    count = held_out_count(rows, fraction)
    held = np.zeros(rows, bool)
    if classes is None:
        held[order[:count]] = True
        return held
    sizes = np.bincount(classes)
    quota = _quotas(sizes, count, np.maximum(sizes - 1, 0) if keep_one else sizes)
    labels = classes.astype(np.uint16) if len(quota) <= 2**16 else classes  # NumPy sorts these by their digits
    for first in range(0, rows, PIECE):
        piece = order[first : first + PIECE]
        held[piece] = _first_of_each(labels[piece], quota)
    return held


def hold_out_order(rows: int, seed: int) -> Array:
    """The order in which rows are chosen to be held out: `permutation(rows, seed, 2**61)`."""
    return permutation(rows, seed, HOLD_OUT_EPOCH).numpy()


def _quotas(sizes: Array, count: int, limits: Array) -> Array:
    """The rows of each class to hold out, `count` in all: its share, and one more for the largest remainders.

    No class gives more than its limit, unless the limits together are below `count`.
    """
    exact = sizes * (count / sizes.sum())
    quotas = np.minimum(np.floor(exact).astype(np.int64), limits)
    by_remainder = np.argsort(quotas - exact, kind="stable")
    while (missing := count - quotas.sum()) > 0:
        below = by_remainder[quotas[by_remainder] < limits[by_remainder]]
        quotas[below[:missing]] += 1
        limits = limits if len(below) else sizes
    return quotas


def _first_of_each(labels: Array, quota: Array) -> Array:
    """Whether each of these rows is among the first `quota` of its class. Takes them off the quota."""
    by_class = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels, minlength=len(quota))
    position = np.empty(len(labels), np.int64)  # of each row within its class
    position[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = position < quota[labels]
    quota -= np.minimum(quota, sizes)
    return chosen
