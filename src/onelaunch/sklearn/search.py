"""`onelaunch.sklearn.SweepCV`: a grid or random search with cross-validation whose fits train together."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn import config_context, get_config
from sklearn.base import clone, is_classifier
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, indexable
from sklearn.utils.validation import _num_samples

from onelaunch.errors import MAX_LONG_LINE, ArgumentTypeError, OnelaunchError, first_line
from onelaunch.sklearn.estimator import BaseMLP
from onelaunch.sklearn.parameter_checks import check_parameters
from onelaunch.sklearn.parameter_names import in_parameters, named_by_parameters
from onelaunch.sklearn.scores import scores_of
from onelaunch.sklearn.search_arguments import (
    Parameters,
    candidates_of,
    check_scoring,
    splits_of,
    weights_of,
)
from onelaunch.sklearn.training import NetworkRuns, Prepared
from onelaunch.sweep.active import Job, Switch
from onelaunch.sweep.spread import in_chunks
from onelaunch.sweep.trainer import train
from onelaunch.train.history import History
from onelaunch.train.interrupts import on_interrupt

OF_THE_ROWS = ("scale", "scale_target", "class_weight")  # the parameters on which the prepared rows depend


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


@dataclass(frozen=True)
class Task:
    """What the fits of a search have in common; it travels to other processes."""

    estimator: BaseMLP
    X: Any
    y: Any
    fit_weights: Any
    score_weights: Any
    splits: list[tuple[np.ndarray, np.ndarray]]
    scorers: Any
    train_scores: bool
    error_score: Any
    threads: int  # of the process that searches: those of others must not change results
    settings: dict[str, Any]  # of scikit-learn, in the thread that searches: others have their own

    def rows(self, chosen: np.ndarray, weights: Any) -> tuple[Any, Any, Any]:
        weights = None if weights is None else _safe_indexing(weights, chosen)
        return _safe_indexing(self.X, chosen), _safe_indexing(self.y, chosen), weights

    def score(self, estimator: BaseMLP, rows: tuple[Any, Any, Any]) -> Any:
        """One number, a dict of them for several metrics, or None where the scorer raised."""
        X, y, weights = rows
        arguments = {} if weights is None else {"sample_weight": weights}
        return scores_of(self.scorers, estimator, X, y, self.error_score, arguments)


@dataclass
class Fit:
    """One candidate on one fold: its estimator, and what is left to train of its networks."""

    number: int
    split: int
    estimator: BaseMLP
    prepared: Prepared
    models: list[Any]
    histories: dict[int, History] = field(default_factory=dict)
    error: str = ""
    left: int = 0
    begin: float = 0.0


def evaluate(task: Task, pairs: Sequence[tuple[Parameters, int]]) -> list[dict[str, Any]]:
    """Train all pairs of candidate and fold together, and score each. Returns what `_format_results` of scikit-learn takes."""
    with config_context(**task.settings):
        return _Evaluation(task, pairs).run()


class _Evaluation:
    def __init__(self, task: Task, pairs: Sequence[tuple[Parameters, int]]) -> None:
        self.task, self.pairs = task, pairs
        self.runs = NetworkRuns(task.threads)
        self.fits: dict[int, Fit] = {}  # by the number of each of its networks, until all of them are trained
        self.out: list[dict[str, Any]] = [{} for _ in pairs]
        self._prepared: dict[Any, tuple[Prepared, dict[str, Any]]] = {}
        self._rows: dict[int, tuple[Any, Any, Any]] = {}

    def run(self) -> list[dict[str, Any]]:
        switch = Switch()
        with on_interrupt(switch.interrupt):
            for outcome in train(self._jobs(), switch):
                fit = self.fits.pop(outcome.index)
                fit.histories[outcome.index] = outcome.history
                fit.error = fit.error or in_parameters(outcome.error)
                fit.left -= 1
                if not fit.left:
                    self._score(fit)
        if switch.stop:
            raise KeyboardInterrupt
        return self.out

    def _jobs(self) -> Iterator[Job]:
        index = 0
        for number, (parameters, split) in enumerate(self.pairs):
            begin = time.time()
            try:
                estimator = clone(self.task.estimator).set_params(**clone(parameters, safe=False))
                prepared = self._prepare(estimator, split)
                networks = estimator._networks(prepared)
                with named_by_parameters():
                    runs = [self.runs.run(network) for network in networks]
            except Exception as error:  # GridSearchCV too takes any
                if self.task.error_score == "raise":
                    raise
                self._fail(number, first_line(error, MAX_LONG_LINE).rstrip(":"), begin)
                continue
            models = [network.model for network in networks]
            fit = Fit(number, split, estimator, prepared, models, left=len(networks), begin=begin)
            for run in runs:
                self.fits[index] = fit
                yield Job(index, lambda run=run: run)  # type: ignore[misc]
                index += 1

    def _prepare(self, estimator: BaseMLP, split: int) -> Prepared:
        """The rows of a fold, prepared once for all candidates that scale and weigh them alike."""
        settings = estimator.get_params(deep=False)
        key = (split, *(repr(settings.get(name)) for name in OF_THE_ROWS))
        if key not in self._prepared:
            before = set(vars(estimator))
            prepared = estimator._prepare(*self.task.rows(self.task.splits[split][0], self.task.fit_weights))
            learned = {name: value for name, value in vars(estimator).items() if name not in before}
            self._prepared[key] = prepared, learned
        prepared, learned = self._prepared[key]
        check_parameters(estimator)
        estimator.__dict__.update(learned)
        return prepared

    def _fail(self, number: int, error: str, begin: float) -> None:
        self.out[number] = {
            "test_scores": None, "fit_time": time.time() - begin, "score_time": 0.0, "n_test_samples": 0, "fit_error": error
        }  # fmt: skip
        if self.task.train_scores:
            self.out[number]["train_scores"] = None

    def _score(self, fit: Fit) -> None:
        if fit.error:
            if self.task.error_score == "raise":
                raise ValueError(fit.error)
            self._fail(fit.number, fit.error, fit.begin)
            return
        for model in fit.models:
            model.to("cpu").eval()
        histories = [history for _, history in sorted(fit.histories.items())]
        fit.estimator._finish(fit.prepared, fit.models, histories, continues=False)
        train_rows, test_rows = self.task.splits[fit.split]
        trained = time.time()
        rows = self._test_rows(fit.split, test_rows)
        entry = {"test_scores": self.task.score(fit.estimator, rows)}
        if self.task.train_scores:
            entry["train_scores"] = self.task.score(fit.estimator, self.task.rows(train_rows, self.task.score_weights))
        # Fits train together: a fit's time is its share of the seconds since it began.
        self.out[fit.number] = {
            **entry, "fit_time": sum(history.seconds for history in histories), "score_time": time.time() - trained,
            "n_test_samples": _num_samples(rows[0]), "fit_error": "",
        }  # fmt: skip

    def _test_rows(self, split: int, chosen: np.ndarray) -> tuple[Any, Any, Any]:
        if split not in self._rows:
            self._rows[split] = self.task.rows(chosen, self.task.score_weights)
        return self._rows[split]
