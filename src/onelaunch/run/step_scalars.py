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


def row_weights(spec: Spec, first: int, count: int, outputs: int) -> Array:
    """The factor that turns a batch's summed loss into its mean, for `count` steps of one epoch, as float64 `[count]`."""
    return 1 / (batch_rows(spec, first, count) * values_per_row(spec, outputs))


def step_scalars(spec: Spec, first: int, count: int, outputs: int) -> dict[str, Array]:
    """`rows`, `row_weight` and the optimizer's `rate`, `inverse_root` and `decay` of `count` steps, each float64 `[count]`.

    The steps start at `first` and belong to one epoch.
    """
    steps = np.arange(first, first + count, dtype=np.float64)
    if spec.schedule == "constant":
        rates = np.full(count, spec.lr)
    else:
        rates = np.array([spec.lr_at(step) for step in range(first, first + count)])
    return {
        "rows": batch_rows(spec, first, count),
        "row_weight": row_weights(spec, first, count, outputs),
        **OPTIMIZERS[spec.optimizer].step_scalars(spec, rates, steps),
    }
