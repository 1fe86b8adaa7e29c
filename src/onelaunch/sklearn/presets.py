"""`preset`: what an estimator does where its other parameters are at their defaults, and calibrated probabilities.

"best" trains several networks for longer. Each leaves out a part of the rows, so that every row is left out by one network. In
regression a network keeps its best epoch on them. Of classes, whose labels are a little less certain then, one temperature is
found on all of these rows, by which the logits are divided: without it, networks that have learned a table by heart are far too
certain of other rows, and with it they need not stop before their schedule ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
from scipy.special import log_softmax

from onelaunch.errors import OnelaunchError
from onelaunch.run import table_defaults as defaults
from onelaunch.sklearn.training import Prepared

TEMPERATURES = (0.2, 10.0)


class Preset(NamedTuple):
    """networks: how many. steps, epochs: to aim at, and at most. label_smoothing: of classes. leaves_out: each, a part of the
    rows.
    """

    networks: int = 1
    steps: int = defaults.STEPS
    epochs: int = defaults.MAX_EPOCHS
    label_smoothing: float = 0.0
    leaves_out: bool = False


PRESETS = {"default": Preset(), "best": Preset(8, 1000, 100, 0.1, True)}


def preset_of(estimator: Any) -> Preset:
    """The preset, with the parameters of the estimator that are not at their defaults."""
    preset = PRESETS[estimator.preset]
    if estimator.n_estimators != 1:
        preset = preset._replace(networks=estimator.n_estimators)
    if smoothing := getattr(estimator, "label_smoothing", 0.0):
        preset = preset._replace(label_smoothing=smoothing)
    return preset


def check_preset(estimator: Any, partial: bool) -> None:
    """Raise OnelaunchError for what does not go with a preset of several networks that leave rows out."""
    if estimator.preset == "default":
        return
    given = f"preset={estimator.preset!r}"
    if partial:
        raise OnelaunchError(f"{given} trains on all rows at once: call fit instead of partial_fit, or pass 'default'")
    for name, value in (("solver", "lbfgs"), ("warm_start", True)):
        if getattr(estimator, name) == value:
            raise OnelaunchError(f"{given} does not go with {name}={value!r}: pass preset='default'")


def left_out(prepared: Prepared, networks: int, seed: int) -> list[np.ndarray]:
    """The rows that each network leaves out: every row once, each class in equal parts. None if there are too few to spare."""
    if networks < 2 or len(prepared.x) < 2 * networks or prepared.loss not in ("cross_entropy", "mse"):
        return [np.zeros(0, np.int64) for _ in range(networks)]
    order = np.random.default_rng(seed).permutation(len(prepared.x))
    if prepared.loss == "cross_entropy":
        order = order[np.argsort(prepared.y[order], kind="stable")]
    return [np.sort(order[number::networks]) for number in range(networks)]


def temperature_of(logits: Sequence[np.ndarray], targets: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> float:
    """The temperature with the smallest mean log loss: probabilities are the softmax of logits / temperature."""
    if not sum(map(len, targets)):
        return 1.0
    outputs, labels, weight = np.concatenate(logits), np.concatenate(targets), np.concatenate(weights)

    def loss(logarithm: float) -> float:
        chosen = log_softmax(outputs / np.exp(logarithm), axis=1)[np.arange(len(labels)), labels]
        return float(-(chosen * weight).sum())

    found = scipy.optimize.minimize_scalar(loss, bounds=tuple(np.log(TEMPERATURES)), method="bounded")
    return float(np.exp(found.x))
