"""Checks the arguments of a search: one line per mistake, of the types that scikit-learn raises."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.metrics import get_scorer_names
from sklearn.model_selection import ParameterGrid, ParameterSampler, check_cv
from sklearn.utils.validation import _num_samples

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_integer, suggest

Parameters = dict[str, Any]
Splits = list[tuple[np.ndarray, np.ndarray]]


def check_scoring(scoring: Any) -> None:
    """Raise OnelaunchError for what is not a score, and for the name of one that scikit-learn does not have."""
    known = get_scorer_names()
    if not (scoring is None or callable(scoring) or isinstance(scoring, str | list | tuple | dict)):
        raise ArgumentTypeError(f"scoring={abbreviate(scoring)} is not a score: pass a name such as 'accuracy' or 'r2'")
    for name in scoring if isinstance(scoring, list | tuple) else [scoring]:
        if isinstance(name, str) and name not in known:
            remedy = "pass one of sklearn.metrics.get_scorer_names(), such as 'accuracy' or 'r2'"
            raise OnelaunchError(f"scoring={name!r} is not known: {remedy}{suggest(name, known)}")


def candidates_of(param_grid: Any, n_iter: Any, random_state: Any, known: Sequence[str]) -> list[Parameters]:
    """The candidates of `param_grid`: every combination, or `n_iter` random ones. `known`: the estimator's parameters."""
    parts = [param_grid] if isinstance(param_grid, Mapping) else param_grid
    if isinstance(parts, str) or not isinstance(parts, Sequence) or not all(isinstance(p, Mapping) for p in parts):
        raise ArgumentTypeError(
            f"param_grid={abbreviate(param_grid)} is not a dict of lists: pass for example {{'alpha': [1e-4, 1e-2]}}"
        )
    for part in parts:
        for name, values in part.items():
            _check_values(name, values, n_iter, known)
    if n_iter is None:
        found = list(ParameterGrid(param_grid))
    else:
        count = require_integer("n_iter", n_iter, "the number of random candidates, 1 or more, or None")
        if count < 1:
            raise OnelaunchError(f"n_iter={count} must be 1 or more, or None for every combination")
        found = list(ParameterSampler(param_grid, count, random_state=random_state)) if parts else []
    if not found:
        raise OnelaunchError("param_grid=[] leaves nothing to train: pass for example {'alpha': [1e-4, 1e-2]}")
    return found


def _check_values(name: Any, values: Any, n_iter: Any, known: Sequence[str]) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"param_grid has the key {abbreviate(name)}: pass names of the estimator's parameters")
    if name not in known:
        listed = suggest(name, known) or f": it has {', '.join(known)}"
        raise OnelaunchError(f"param_grid[{name!r}] is not a parameter of the estimator{listed}")
    where = f"param_grid[{name!r}]"
    if hasattr(values, "rvs"):
        if n_iter is None:
            raise OnelaunchError(f"{where} is a distribution: pass n_iter=, the number of random candidates")
        return
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ArgumentTypeError(f"{where}={abbreviate(values)} is not a list: pass [{abbreviate(values)}]")
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise OnelaunchError(f"{where} has shape {list(np.shape(values))}: pass a list of values")
    if not len(values):
        raise OnelaunchError(f"{where} is empty: pass at least one value, or leave it out")


def splits_of(cv: Any, X: Any, y: Any, groups: Any, *, classifier: bool) -> Splits:
    """The pairs (training rows, test rows) of `cv`, as scikit-learn makes them. Raises ValueError for rows that X has not."""
    rows = _num_samples(X)
    if isinstance(cv, numbers.Integral) and not 2 <= int(cv) <= rows:
        raise OnelaunchError(f"cv={cv} must be from 2 to the number of rows, {rows}")
    if not isinstance(cv, numbers.Integral | None) and not hasattr(cv, "split"):
        cv = list(cv)
        for number, pair in enumerate(cv):
            _check_pair(f"cv[{number}]", pair, rows)
    found = list(check_cv(cv, y, classifier=classifier).split(X, y, groups))
    if not found:
        raise OnelaunchError("cv has no split: pass a number of folds, or pairs (training rows, test rows)")
    return found


def _check_pair(where: str, pair: Any, rows: int) -> None:
    if not hasattr(pair, "__len__") or len(pair) != 2:
        raise ArgumentTypeError(f"{where}={abbreviate(pair)} is not a pair (training rows, test rows)")
    for part in pair:
        array = np.asarray(part)
        if array.ndim != 1 or array.dtype.kind not in "iub" or not len(array):
            raise ArgumentTypeError(f"{where} has {abbreviate(part)}, which is not a vector of row numbers")
        if array.dtype == bool and len(array) != rows:
            raise OnelaunchError(f"{where} has a mask of {len(array)} rows, X has {rows}: pass one value per row")
        if array.dtype != bool and not -rows <= array.min() <= array.max() < rows:
            wrong = array[(array < -rows) | (array >= rows)][0]
            raise OnelaunchError(f"{where} has row {wrong}: X has the rows 0 to {rows - 1}")


def weights_of(sample_weight: Any, X: Any) -> np.ndarray | None:
    """`sample_weight` as an array with one number per row of X, or None."""
    if sample_weight is None:
        return None
    weights = np.asarray(sample_weight)
    if weights.shape != (_num_samples(X),) or weights.dtype.kind not in "buif":
        raise OnelaunchError(
            f"sample_weight={abbreviate(sample_weight)} must have one number for each of the {_num_samples(X)} rows of X"
        )
    return weights
