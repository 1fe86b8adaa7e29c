"""The host's side of the device table: the run's constants in line 0, then one line per step."""

from __future__ import annotations

import numpy as np

from onelaunch.engines.graph.kernels.run_arguments import SCALARS, WIDTH
from onelaunch.optimizers import Array, constants
from onelaunch.run.spec import Spec
from onelaunch.run.step_scalars import step_scalars


def hyperparameters(spec: Spec) -> tuple[float, ...]:
    """Line 0 of the table, in the order of HYPER."""
    return (*constants(spec).values(), spec.label_smoothing)


def step_lines(spec: Spec, first: int, count: int, outputs: int) -> Array:
    """The table's lines of `count` steps of one epoch, in the order of SCALARS."""
    columns = step_scalars(spec, first, count, outputs)
    lines = np.zeros((count, WIDTH))
    for place, name in enumerate(SCALARS):
        lines[:, place] = columns[name]
    return lines
