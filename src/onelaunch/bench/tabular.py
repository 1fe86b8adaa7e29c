"""`onelaunch bench tabular`: our estimators and scikit-learn's on real tables, five folds, defaults against defaults.

The error is the fraction of wrong classes, or the root of the mean squared error. Times are of `fit` alone. Each contender
sees the same folds. `scikit-learn MLP, scaled` has a StandardScaler in front, the others get the rows as they are.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onelaunch.bench.case import OURS, Trial, Work
from onelaunch.bench.tables import TABLES, BenchTable, folds_of

MLP, SCALED_MLP, FOREST, BOOSTING = (
    "scikit-learn MLP", "scikit-learn MLP, scaled", "random forest", "hist gradient boosting"
)  # fmt: skip
TREES = (FOREST, BOOSTING)
FOLDS = 5
PREFIX = "tabular/"  # of the name of a case, before that of the table
NEAR = 1.02  # an error within 2 % of the best tree's counts as equal


def contenders(classifies: bool) -> dict[str, Callable[[], Any]]:
    """By name: a function that makes an estimator with default parameters. RealMLP takes part where it is installed."""
    from sklearn import ensemble, neural_network
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from onelaunch import sklearn as ours

    kind = "Classifier" if classifies else "Regressor"

    def make(module: Any, name: str, **options: Any) -> Any:
        return getattr(module, f"{name}{kind}")(random_state=0, **options)

    found = {
        OURS: lambda: make(ours, "MLP"),
        MLP: lambda: make(neural_network, "MLP"),
        SCALED_MLP: lambda: make_pipeline(StandardScaler(), make(neural_network, "MLP")),
        FOREST: lambda: make(ensemble, "RandomForest"),
        BOOSTING: lambda: make(ensemble, "HistGradientBoosting"),
    }
    try:
        import pytabkit
    except ImportError:
        return found
    return found | {"RealMLP": lambda: make(pytabkit, "RealMLP_TD_")}


def trial_of(table: BenchTable) -> Trial:
    """Fits on one fold after another, timed, with the error of each on the rows of its fold that were held out."""
    folds = folds_of(table, FOLDS)
    errors: dict[str, list[float]] = {}

    def work(name: str, make: Callable[[], Any]) -> Work:
        parts = itertools.cycle(folds)
        errors[name] = []

        def fit() -> float:
            x, y, test_x, test_y = next(parts)
            estimator = make()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # scikit-learn's MLP says that it has not converged
                begin = time.perf_counter()
                estimator.fit(x, y)
                seconds = time.perf_counter() - begin
            predicted = np.asarray(estimator.predict(test_x))
            wrong = predicted != test_y if table.classifies else np.square(predicted - test_y)
            errors[name].append(float(wrong.mean() if table.classifies else np.sqrt(wrong.mean())))
            return seconds

        return fit

    works = {name: work(name, make) for name, make in contenders(table.classifies).items()}
    x, _, test_x, _ = folds[0]
    notes = {"rows": f"{len(x) + len(test_x):,}", "inputs": f"{x.shape[1]:,}"}
    return Trial(
        works.pop(OURS), _nothing, works, self_timed=True, warm_ups=0, repeats=FOLDS, errors=errors, notes=notes
    )  # fmt: skip


def _nothing() -> None:
    """There is no reference to compare an estimator with: its errors are part of the result."""


def mean_error(case: dict[str, Any], name: str) -> float:
    return float(np.mean(case["errors"][name]))


def of_best_tree(case: dict[str, Any]) -> float:
    """Our error over that of the better of random forest and gradient boosting; 1 where both are 0."""
    best = min(mean_error(case, name) for name in TREES)
    ours = mean_error(case, OURS)
    return ours / best if best else (1.0 if ours == 0 else float("inf"))


def summarise(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean ranks (1 is best; equal errors share a rank), total seconds per fit, and the number of tables near the best tree,
    over the cases in which all contenders of the first one were timed."""
    from scipy.stats import rankdata

    names = list(cases[0]["errors"])
    cases = [case for case in cases if {*names, *TREES} <= case["errors"].keys()]
    if not cases:
        return {}
    errors = np.array([[mean_error(case, name) for name in names] for case in cases])
    ranks = rankdata(errors, axis=1).mean(axis=0)
    seconds = [sum(case["times"][name]["median"] for case in cases) for name in names]
    near = {case["name"] for case in cases if of_best_tree(case) <= NEAR}
    unseen = {case["name"] for case in cases if TABLES[case["name"].removeprefix(PREFIX)].unseen}
    return {
        "tables": len(cases), "near_best_tree": len(near), "unseen": len(unseen),
        "unseen_near_best_tree": len(near & unseen), "mean_rank": dict(zip(names, ranks.tolist(), strict=True)),
        "fit_seconds": dict(zip(names, seconds, strict=True)),
    }  # fmt: skip
