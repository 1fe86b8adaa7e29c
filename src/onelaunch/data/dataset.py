"""The form in which every source returns its data, and how a test part is held out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onelaunch.data.hold_out import held_out_mask, hold_out_order
from onelaunch.errors import ArgumentTypeError, DataError


@dataclass(frozen=True)
class Dataset:
    """Rows to learn from. Every array is contiguous, writable, in native byte order, finite and not empty."""

    name: str
    """The name that was passed: `mnist`, or the name of a file."""
    source: str
    """One line for the reader: which data this is and where it came from."""
    x: np.ndarray
    """One row per sample: uint8 images, which stand for value / 255, or float32 features."""
    y: np.ndarray
    """int64 classes `[n]`, or float32 targets `[n]` or `[n, k]`."""
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    """None if the data has no test part of its own; see `split`."""
    classes: tuple[str, ...] | None = None
    """The name of each class, in the order of the labels; None if y holds values to regress."""
    fallback: bool = False
    """True if this is a small substitute for the full set; `source` says why."""
    encoding: Any = None
    """Of a table, its `table_encoding.TableEncoding`: how rows became inputs and targets."""
    test_values: np.ndarray | None = None
    """Of a table, the targets of its test part as the file has them: int64 class numbers, or float64 numbers."""
    image_shape: tuple[int, ...] | None = None
    """Of flat rows that are images: the shape of one image."""
    test_table: Any = None
    """Of a table, the rows of its test part as the file has them, a `table_file.Table`."""
    notes: tuple[str, ...] = ()
    """What may surprise about the data: one line each."""


def split(dataset: Dataset, fraction: float, seed: int) -> Dataset:
    """The same data with round(n * fraction) of its n rows held out for testing; each part gets at least one row.

    The test rows are the first of `permutation(n, seed, 2**61)`, the training rows are the rest, both in that order.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise ArgumentTypeError(f"fraction={fraction!r} is not a number: pass one between 0 and 1")
    if not 0 < fraction < 1:
        raise DataError(f"fraction={fraction} is out of range: pass a number between 0 and 1")
    if dataset.test_x is not None:
        raise DataError(f"{dataset.name}: already has a test part of its own: use that one, do not split it again")
    rows = len(dataset.x)
    if rows < 2:
        raise DataError(f"{dataset.name}: {rows} row cannot be split into a training and a test part: pass 2 at least")
    rest, test = held_out_rows(rows, fraction, seed)
    return replace(
        dataset,
        source=f"{dataset.source}, split {len(rest):,}/{len(test):,}",
        x=dataset.x[rest],
        y=dataset.y[rest],
        test_x=dataset.x[test],
        test_y=dataset.y[test],
    )


def held_out_rows(
    rows: int, fraction: float, seed: int, classes: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(training rows, test rows) of 2 rows or more, both in the order of `permutation(rows, seed, 2**61)`.

    Without `classes` they are those of `split`. With them, int64 `[rows]`, each class gives its share of the test rows, and
    one of its rows stays in training where there are rows enough.
    """
    order = hold_out_order(rows, seed)
    held = held_out_mask(order, fraction, classes, keep_one=True)[order]
    return order[~held], order[held]
