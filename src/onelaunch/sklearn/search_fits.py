"""The fits of a search: their rows, their training together or alone, and their scores."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn import config_context
from sklearn.base import clone
from sklearn.utils import _safe_indexing
from sklearn.utils.validation import _num_samples

from onelaunch.errors import MAX_LONG_LINE, first_line
from onelaunch.sklearn.estimator import BaseMLP
from onelaunch.sklearn.parameter_checks import check_parameters
from onelaunch.sklearn.parameter_names import in_parameters, named_by_parameters
from onelaunch.sklearn.scores import scores_of
from onelaunch.sklearn.search_arguments import Parameters
from onelaunch.sklearn.training import NetworkRuns, Prepared
from onelaunch.sweep.active import Job, Switch
from onelaunch.sweep.trainer import train
from onelaunch.train.history import History
from onelaunch.train.interrupts import on_interrupt

# The parameters on which the prepared rows depend.
OF_THE_ROWS = ("scale", "scale_target", "class_weight", "shuffle")


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
        self.switch = Switch()
        self.fits: dict[int, Fit] = {}  # by the number of each of its networks, until all of them are trained
        self.out: list[dict[str, Any]] = [{} for _ in pairs]
        self._prepared: dict[Any, tuple[Prepared, dict[str, Any]]] = {}
        self._rows: dict[int, tuple[Any, Any, Any]] = {}

    def run(self) -> list[dict[str, Any]]:
        with on_interrupt(self.switch.interrupt):
            for outcome in train(self._jobs(), self.switch):
                fit = self.fits.pop(outcome.index)
                fit.histories[outcome.index] = outcome.history
                fit.error = fit.error or in_parameters(outcome.error)
                fit.left -= 1
                if not fit.left:
                    self._score(fit)
        if self.switch.stop:
            raise KeyboardInterrupt
        return self.out

    def _jobs(self) -> Iterator[Job]:
        index = 0
        for number, (parameters, split) in enumerate(self.pairs):
            if self.switch.stop:
                return
            begin = time.time()
            try:
                estimator = clone(self.task.estimator).set_params(**clone(parameters, safe=False))
                prepared = self._prepare(estimator, split)
                networks = estimator._networks(prepared)
                histories: list[History] = []
                with named_by_parameters():
                    if estimator._trains_alone(networks):
                        histories = estimator._train(networks, prepared)
                    else:
                        runs = [self.runs.run(network) for network in networks]
            except Exception as error:  # GridSearchCV too takes any
                if self.task.error_score == "raise":
                    raise
                self._fail(number, first_line(error, MAX_LONG_LINE).rstrip(":"), begin)
                continue
            models = [network.model for network in networks]
            fit = Fit(number, split, estimator, prepared, models, left=len(networks), begin=begin)
            if histories:
                fit.histories = dict(enumerate(histories))
                self._score(fit)
                continue
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
