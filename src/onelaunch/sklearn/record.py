"""The record of training on a fitted estimator, in the attributes of scikit-learn's class."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

from sklearn.exceptions import ConvergenceWarning

from onelaunch.sklearn.convergence import Convergence, validation_score
from onelaunch.train.history import History

OF_EPOCHS = ("loss_curve_", "validation_scores_", "best_validation_score_", "best_loss_")  # not of "lbfgs"


def record_fit(estimator: Any, histories: list[History], rows: int, continues: bool) -> None:
    """Set the attributes that say how training went; of several networks, the first one's.

    `n_iter_` counts the epochs of all calls on the same networks; with `solver`, as in scikit-learn, those of the last call.
    """
    epochs = histories[0].epochs
    estimator.history_ = histories[0]
    estimator.loss_ = epochs[-1]["loss"]
    seen = estimator.t_ if continues else 0
    if estimator.solver == "lbfgs":
        estimator.n_iter_, estimator.t_ = epochs[-1]["step"], seen
        for name in OF_EPOCHS:
            with contextlib.suppress(AttributeError):
                delattr(estimator, name)
        return
    before = getattr(estimator, "loss_curve_", []) if continues else []
    estimator.loss_curve_ = before + [epoch["loss"] for epoch in epochs]
    estimator.n_iter_ = len(estimator.loss_curve_) if estimator.solver is None else len(epochs)
    estimator.t_ = seen + rows * len(epochs)
    scores = [validation_score(epoch["validation"]) for epoch in epochs if epoch["validation"]]
    estimator.validation_scores_ = scores or None
    estimator.best_validation_score_ = max(scores) if scores else None
    estimator.best_loss_ = None if scores else min(estimator.loss_curve_)


def warn_of_max_iter(max_iter: int, rules: Convergence) -> None:
    """Warn as scikit-learn does after `max_iter` epochs, unless `tol` ended training in the last of them."""
    if not rules.reached:
        message = f"training ended after max_iter={max_iter} epochs, before it converged by tol: pass a larger max_iter"
        warnings.warn(message, ConvergenceWarning, stacklevel=2)
