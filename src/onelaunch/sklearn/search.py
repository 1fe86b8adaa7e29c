"""`onelaunch.sklearn.SweepCV`: a grid or random search with cross-validation whose fits train together."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn import get_config
from sklearn.base import clone, is_classifier
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils import indexable

from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.sklearn.estimator import BaseMLP
from onelaunch.sklearn.search_arguments import (
    Parameters,
    candidates_of,
    check_scoring,
    splits_of,
    weights_of,
)
from onelaunch.sklearn.search_fits import Task, evaluate
from onelaunch.sweep.spread import in_chunks


class SweepCV(BaseSearchCV):
    """Search for the best parameters of an `MLPClassifier` or `MLPRegressor` of this package by cross-validation.

    It has the interface and attributes of scikit-learn's GridSearchCV, and with `n_iter` those of RandomizedSearchCV. All
    candidates and folds are one sweep: on a CPU they train on all threads, on a GPU many in one launch.

    estimator: the estimator to search with; it is not changed.
    param_grid: {name: list of values}, or a list of such dicts. With n_iter, values may be distributions with `rvs`.
    n_iter: the number of random candidates; None tries every combination.
    scoring, refit, cv, error_score, return_train_score: as in GridSearchCV.
    n_jobs: how many chunks of fits joblib runs at a time (in its active backend, such as Dask); None trains here.
    random_state: of the random candidates.

    Attributes: `cv_results_`, `best_estimator_`, `best_params_`, `best_score_`, `best_index_`, `scorer_`, `n_splits_`,
    `refit_time_`, `multimetric_`, and those of the best estimator.
    """

    def __init__(
        self,
        estimator: BaseMLP,
        param_grid: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        n_iter: int | None = None,
        scoring: Any = None,
        n_jobs: int | None = None,
        refit: Any = True,
        cv: Any = None,
        verbose: int = 0,
        random_state: Any = None,
        error_score: Any = np.nan,
        return_train_score: bool = False,
    ) -> None:
        super().__init__(
            estimator=estimator, scoring=scoring, n_jobs=n_jobs, refit=refit, cv=cv, verbose=verbose,
            error_score=error_score, return_train_score=return_train_score,
        )  # fmt: skip
        self.param_grid = param_grid
        self.n_iter = n_iter
        self.random_state = random_state

    def _run_search(self, evaluate_candidates: Any) -> None:
        raise NotImplementedError("SweepCV trains its candidates together")

    def fit(self, X: Any, y: Any = None, *, groups: Any = None, sample_weight: Any = None) -> SweepCV:
        """Train and score every candidate on every fold, then the best one on all rows; returns self.

        groups: passed to the splitter of `cv`. sample_weight: one number per row, for training and for scores where
        GridSearchCV of the installed scikit-learn weighs them, or where metadata routing requests it.
        """
        if not isinstance(self.estimator, BaseMLP):
            remedy = "pass MLPClassifier or MLPRegressor, or use scikit-learn's GridSearchCV"
            if isinstance(self.estimator, Pipeline):
                remedy = "put SweepCV inside the pipeline, as its last step, or use scikit-learn's GridSearchCV"
            raise ArgumentTypeError(
                f"estimator={type(self.estimator).__name__} is not an estimator of onelaunch.sklearn: {remedy}"
            )
        check_scoring(self.scoring)
        self._validate_params()
        candidates = candidates_of(
            self.param_grid, self.n_iter, self.random_state, list(self.estimator.get_params(deep=False))
        )
        if y is None:
            raise OnelaunchError("SweepCV requires y to be passed, but the target y is None")
        X, y, groups = indexable(X, y, groups)
        weights = weights_of(sample_weight, X)
        scorers, refit_metric = self._get_scorers()
        routed = self._get_routed_params_for_fit({} if weights is None else {"sample_weight": weights})
        splits = splits_of(self.cv, X, y, groups, classifier=is_classifier(self.estimator))
        self.n_splits_ = len(splits)
        if self.verbose:
            total = len(candidates) * len(splits)
            print(f"Fitting {len(splits)} folds for each of {len(candidates)} candidates, totalling {total} fits")
        task = Task(
            self.estimator, X, y, routed.estimator.fit.get("sample_weight"), routed.scorer.score.get("sample_weight"),
            splits, scorers, self.return_train_score, self.error_score, torch.get_num_threads(), get_config(),
        )  # fmt: skip
        pairs = [(candidate, split) for candidate in candidates for split in range(len(splits))]
        out = in_chunks(evaluate, task, pairs, self.n_jobs)
        failed = [entry["fit_error"] for entry in out if entry["fit_error"]]
        if failed:
            message = f"{len(failed)} of {len(out)} fits failed and have error_score={self.error_score}: {failed[0]}"
            if len(failed) == len(out):
                raise ValueError(f"all {len(out)} fits failed: {failed[0]}")
            warnings.warn(message, FitFailedWarning, stacklevel=2)
        self._set_results(candidates, out, refit_metric)
        if self.refit:
            self.best_estimator_ = clone(self.estimator).set_params(**clone(self.best_params_, safe=False))
            begin = time.time()
            self.best_estimator_.fit(X, y, **routed.estimator.fit)
            self.refit_time_ = time.time() - begin
            if hasattr(self.best_estimator_, "feature_names_in_"):
                self.feature_names_in_ = self.best_estimator_.feature_names_in_
        self.scorer_ = getattr(scorers, "_scorers", scorers)
        return self

    def _set_results(self, candidates: list[Parameters], out: list[dict[str, Any]], refit_metric: Any) -> None:
        first: Any = next((entry["test_scores"] for entry in out if entry["test_scores"] is not None), None)
        self.multimetric_ = isinstance(first, dict)
        if callable(self.scoring) and self.multimetric_:
            self._check_refit_for_multimetric(first)
            refit_metric = self.refit
        for entry in out:  # a fit or scorer that failed has the error score for every metric
            for name in ("test_scores", "train_scores"):
                if entry.get(name, 0) is None:
                    entry[name] = dict.fromkeys(first, self.error_score) if self.multimetric_ else self.error_score
        results = self._format_results(candidates, self.n_splits_, out)
        if self.refit or not self.multimetric_:
            self.best_index_ = self._select_best_index(self.refit, refit_metric, results)
            if not callable(self.refit):
                self.best_score_ = results[f"mean_test_{refit_metric}"][self.best_index_]
            self.best_params_ = results["params"][self.best_index_]
        self.cv_results_ = results


class FitFailedWarning(RuntimeWarning):
    """Some fits of a search failed; their scores are `error_score`."""
