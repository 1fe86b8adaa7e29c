"""The per-step scalars that engines compute on the host, in double precision as PyTorch does."""

from __future__ import annotations

import numpy as np

from onelaunch.optimizers import OPTIMIZERS, Array
from onelaunch.run.objective import values_per_row
from onelaunch.run.spec import Spec


def batch_rows(spec: Spec, first: int, count: int) -> Array:
    """Rows per batch of `count` steps of one epoch, from step `first`, as float64 `[count]`."""
    rows = np.full(count, min(spec.batch_size, spec.rows), np.float64)
    rows[-1] = spec.rows_of(first + count - 1)  # only the last batch of an epoch is smaller
    return rows


def batch_weights(spec: Spec, weights: Array, order: Array) -> Array:
    """The sum of the rows' weights in each batch of an epoch with this row order, as float64 `[steps_per_epoch]`."""
    firsts = np.arange(spec.steps_per_epoch) * spec.batch_size
    used = min(spec.rows, spec.steps_per_epoch * spec.batch_size)
    return np.add.reduceat(weights[order[:used]], firsts, dtype=np.float64)


def row_weights(spec: Spec, first: int, count: int, outputs: int, sums: Array | None = None) -> Array:
    """The factor that turns a batch's summed loss into its mean, for `count` steps of one epoch, as float64 `[count]`.

    `sums`: the summed weights of these steps' rows, where rows are weighted. The factor of a sum of zero is zero.
    """
    if sums is None:
        sums = batch_rows(spec, first, count)
    return np.divide(1.0, sums * values_per_row(spec, outputs), out=np.zeros(count), where=sums > 0)


def step_scalars(spec: Spec, first: int, count: int, outputs: int, sums: Array | None = None) -> dict[str, Array]:
    """`rows`, `row_weight` and the optimizer's `rate`, `inverse_root` and `decay` of `count` steps, each float64 `[count]`.

    The steps start at `first` and belong to one epoch. `sums`: as in `row_weights`.
    """
    steps = np.arange(first, first + count, dtype=np.float64)
    if spec.schedule == "constant":
        rates = np.full(count, spec.lr)
    else:
        rates = np.array([spec.lr_at(step) for step in range(first, first + count)])
    return {
        "rows": batch_rows(spec, first, count),
        "row_weight": row_weights(spec, first, count, outputs, sums),
        **OPTIMIZERS[spec.optimizer].step_scalars(spec, rates, steps),
    }
