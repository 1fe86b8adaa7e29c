"""A sweep that a test kills and continues, the same in its process and in another."""

from __future__ import annotations

from typing import Any

import onelaunch as ol
from tests.sweep.models import make_model, rows


def whole_sweep(strategy: str, **arguments: Any) -> ol.Sweep:
    x, y = rows()
    grid = {"lr": [1e-3, 1e-2, 0.1], "seed": range(100)}
    return ol.sweep(make_model, x, y, grid=grid, folds=2, epochs=9, strategy=strategy, progress=False, **arguments)


def told(result: ol.Sweep) -> str:
    """Everything that a sweep found, without times."""
    return f"{result.table}\n{[record.losses.tolist() for _, record in sorted(result.records.items())]}"
