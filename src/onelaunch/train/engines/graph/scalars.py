"""The numbers a step needs, in double precision on the host: what PyTorch's optimizers compute there too."""

from __future__ import annotations

from typing import Any

import numpy as np

from onelaunch.kernels.run_arguments import SCALARS, WIDTH
from onelaunch.train.spec import Spec


def hyperparameters(spec: Spec) -> tuple[float, ...]:
    """Line 0 of the table, in the order of HYPER."""
    beta1, beta2 = spec.betas
    return spec.momentum, spec.weight_decay, 1 - beta1, beta2, 1 - beta2, spec.eps, spec.label_smoothing


def step_lines(spec: Spec, first: int, count: int, outputs: int) -> np.ndarray[Any, Any]:
    """The table's lines of `count` steps of one epoch, in the order of SCALARS."""
    rows = np.full(count, min(spec.batch_size, spec.rows), np.float64)
    rows[-1] = spec.rows_of(first + count - 1)  # only the last batch of an epoch is smaller
    if spec.schedule == "constant":
        rates = np.full(count, spec.lr)
    else:
        rates = np.array([spec.lr_at(step) for step in range(first, first + count)])
    columns = {name: np.zeros(count) for name in SCALARS}
    columns["rows"] = rows
    columns["row_weight"] = 1 / (rows if spec.loss == "cross_entropy" else rows * outputs)
    columns["rate"] = -rates
    if spec.optimizer != "sgd":
        times = np.arange(first + 1, first + count + 1, dtype=np.float64)
        columns["rate"] = -rates / (1 - spec.betas[0] ** times)
        columns["inverse_root"] = 1 / np.sqrt(1 - spec.betas[1] ** times)
        columns["decay"] = 1 - rates * spec.weight_decay
    lines = np.zeros((count, WIDTH))
    for place, name in enumerate(SCALARS):
        lines[:, place] = columns[name]
    return lines
