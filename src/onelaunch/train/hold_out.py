"""`validation=0.1`: the rows that are held out of training. The seed chooses them; classes keep their proportions."""

from __future__ import annotations

import numpy as np
import torch

from onelaunch.errors import OnelaunchError
from onelaunch.rng import permutation

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
    count = min(max(round(rows * fraction), 1), rows - 1)
    order = permutation(rows, seed, HOLD_OUT_EPOCH).numpy()
    if classes is None:
        chosen = order[:count]
    else:
        labels = classes.cpu().numpy()[order]
        sizes = np.bincount(labels)
        exact = sizes * (count / rows)
        quota = np.floor(exact).astype(np.int64)
        # The classes with the largest remainders give one row more; ties go to the lower class.
        more = np.argsort(quota - exact, kind="stable")[: count - quota.sum()]
        quota[more] += 1
        by_class = np.argsort(labels, kind="stable")  # within a class, in the order of the permutation
        position = np.empty(rows, np.int64)  # of each row within its class
        position[by_class] = np.arange(rows) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        chosen = order[position < quota[labels]]
    held = np.zeros(rows, bool)
    held[chosen] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))
