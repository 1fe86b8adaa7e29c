"""Checks the parameters of an estimator that `fit` does not check: one line per mistake, before anything is trained."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np
import torch

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_integer, require_option
from onelaunch.run.table_defaults import DROPOUT
from onelaunch.sklearn.convergence import RATE_RULES, STEERED
from onelaunch.sklearn.presets import PRESETS

SCALES = ("robust",)
SOLVERS = ("adam", "sgd", "lbfgs")
STEPWISE_ENGINES = ("auto", "eager")  # that visit rows in their order, and let the losses decide on the rate
SWITCHES = ("batch_norm", "layer_norm", "shuffle", "nesterovs_momentum", "warm_start", "scale_target")


def check_parameters(estimator: Any) -> None:
    """Raise OnelaunchError for the first parameter of an MLPClassifier or MLPRegressor that is not valid."""
    require_option("device", estimator.device, ("auto", "cpu", "cuda"))
    if estimator.device == "cuda" and not torch.cuda.is_available():
        raise OnelaunchError("device='cuda', but this machine has no CUDA device: pass 'auto' or 'cpu'")
    for name in SWITCHES:
        if hasattr(estimator, name) and not _is_switch(getattr(estimator, name)):
            raise ArgumentTypeError(f"{name}={abbreviate(getattr(estimator, name))} must be True or False")
    dropout = estimator.dropout
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise OnelaunchError(f"dropout={abbreviate(dropout)} must be a number, 0 or more and below 1")
    if estimator.scale is not None:
        require_option("scale", estimator.scale, SCALES, or_else="None")
    if require_integer("n_estimators", estimator.n_estimators, "a number of networks, 1 or more") < 1:
        raise OnelaunchError(f"n_estimators={estimator.n_estimators} must be 1 or more")
    require_option("preset", estimator.preset, tuple(PRESETS))
    if estimator.solver is not None:
        require_option("solver", estimator.solver, SOLVERS, or_else="None")
    if estimator.learning_rate is not None:
        require_option("learning_rate", estimator.learning_rate, RATE_RULES, or_else="None for schedule")
    if not _is_number(estimator.power_t) or not 0 <= estimator.power_t < math.inf:
        raise OnelaunchError(f"power_t={abbreviate(estimator.power_t)} must be a finite number, 0 or more")
    if require_integer("max_fun", estimator.max_fun, "a number of losses, 1 or more") < 1:
        raise OnelaunchError(f"max_fun={estimator.max_fun} must be 1 or more")
    _check_engine(estimator)
    if estimator.solver == "lbfgs":
        _check_lbfgs(estimator)
    if estimator.batch_norm and estimator.layer_norm:
        raise OnelaunchError("batch_norm=True and layer_norm=True: pass one of the two")
    if not _is_switch(estimator.verbose) and not isinstance(estimator.verbose, numbers.Integral):
        raise ArgumentTypeError(f"verbose={abbreviate(estimator.verbose)} must be True, False or an integer")
    _check_early_stopping(estimator)


def _check_early_stopping(estimator: Any) -> None:
    given, fraction = estimator.early_stopping, estimator.validation_fraction
    if isinstance(given, str):
        require_option("early_stopping", given, ("auto",), or_else="True or False")
    elif not _is_switch(given):
        raise ArgumentTypeError(
            f"early_stopping={abbreviate(given)} must be True, False or 'auto': pass a number of epochs as n_iter_no_change"
        )
    patience = estimator.n_iter_no_change
    if patience != math.inf and require_integer("n_iter_no_change", patience, "a number of epochs, 1 or more") < 1:
        raise OnelaunchError(f"n_iter_no_change={estimator.n_iter_no_change} must be 1 or more epochs")
    if not _is_number(estimator.tol) or not 0 <= estimator.tol < math.inf:
        raise OnelaunchError(f"tol={abbreviate(estimator.tol)} must be a finite number, 0 or more")
    if not _is_number(fraction) or not 0 < fraction < 1:
        raise OnelaunchError(
            f"validation_fraction={abbreviate(fraction)} must be a fraction between 0 and 1, such as 0.1"
        )


def _check_engine(estimator: Any) -> None:
    """Raise OnelaunchError where an engine is requested that has not what other parameters ask for."""
    if estimator.engine in STEPWISE_ENGINES or estimator.solver == "lbfgs":
        return
    steered = estimator.learning_rate in STEERED and (estimator.solver or estimator.optimizer) == "sgd"
    if not estimator.shuffle or steered:
        given = f"learning_rate={estimator.learning_rate!r}" if estimator.shuffle else "shuffle=False"
        raise OnelaunchError(f"engine={estimator.engine!r} does not go with {given}: pass engine='auto'")


def _check_lbfgs(estimator: Any) -> None:
    """Raise OnelaunchError for what makes two losses of the same weights differ, or depend on the batch."""
    if estimator.batch_norm:
        raise OnelaunchError("batch_norm=True does not go with solver='lbfgs': pass layer_norm=True, or solver='adam'")
    if estimator.dropout not in (0, DROPOUT):
        raise OnelaunchError(f"dropout={estimator.dropout} does not go with solver='lbfgs': pass 0, or solver='adam'")
    if estimator.max_iter != "auto" and require_integer("max_iter", estimator.max_iter, "iterations, 1 or more") < 1:
        raise OnelaunchError(f"max_iter={estimator.max_iter} must be 1 or more")
    if not _is_number(estimator.alpha) or not 0 <= estimator.alpha < math.inf:
        raise OnelaunchError(f"alpha={abbreviate(estimator.alpha)} must be a finite number, 0 or more")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_switch(value: object) -> bool:
    """Whether it is a bool of Python's or NumPy's, as a grid of candidates may hold."""
    return isinstance(value, bool | np.bool_)


def hidden_widths(sizes: Any) -> list[int]:
    """`hidden_layer_sizes` as a list: a number means one layer. Raises OnelaunchError for what is not a width."""
    plain = sizes.tolist() if isinstance(sizes, np.ndarray) else sizes
    hidden = plain if isinstance(plain, list | tuple) else [plain]
    if not all(isinstance(size, numbers.Integral) and not isinstance(size, bool) and int(size) > 0 for size in hidden):
        raise OnelaunchError(f"hidden_layer_sizes={abbreviate(sizes)} must be widths of 1 or more, such as (128, 128)")
    return [int(size) for size in hidden]
