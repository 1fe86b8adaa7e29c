"""`validation=0.1`: the rows that are held out of training. The seed chooses them; classes keep their proportions."""

from __future__ import annotations

import numpy as np
import torch

from onelaunch.data.hold_out import held_out_mask, hold_out_order
from onelaunch.errors import OnelaunchError


def hold_out(rows: int, fraction: float, seed: int, classes: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(training rows, held-out rows) as int64 indices in ascending order; round(rows * fraction) rows are held out.

    classes: int64 `[rows]` for a stratified choice. None chooses among all rows alike. See `held_out_mask`.
    """
    if not 0 < fraction < 1:
        raise OnelaunchError(f"validation={fraction} must be a fraction between 0 and 1, or a pair (x, y)")
    if rows < 2:
        raise OnelaunchError(
            f"validation={fraction} cannot hold rows out of {rows}: pass at least 2 rows, or a pair (x, y)"
        )
    labels = None if classes is None else classes.cpu().numpy()
    held = held_out_mask(hold_out_order(rows, seed), fraction, labels)
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))
