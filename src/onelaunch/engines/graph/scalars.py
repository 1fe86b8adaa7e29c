"""The host's side of the device table (kernels/run_state.py): the run's constants in line 0, then one line per step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from onelaunch.engines.graph.kernels.run_arguments import HYPER, SCALARS, TABLE_WIDTH
from onelaunch.optimizers import Array, constants
from onelaunch.run.spec import Spec


def make_table(spec: Spec, lines: int, steps: Mapping[str, Array | float]) -> torch.Tensor:
    """The fp32 table of `lines` lines on the CPU. `steps` has a column per name in SCALARS, from line 1; the rest is zero."""
    table = np.zeros((lines, TABLE_WIDTH))
    run = {**constants(spec), "label_smoothing": spec.label_smoothing, "clip_norm": spec.clip_norm or 0.0}
    table[0, : len(HYPER)] = [run[name] for name in HYPER]
    for column, name in enumerate(SCALARS):
        values = np.atleast_1d(steps.get(name, 0.0))
        table[1 : 1 + len(values), column] = values
    return torch.from_numpy(table.astype(np.float32))
