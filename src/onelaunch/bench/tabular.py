"""`onelaunch bench tabular`: our estimators and scikit-learn's on real tables, five folds, defaults against defaults.

The error is the fraction of wrong classes, or the root of the mean squared error. Times are of `fit` alone. Each contender
sees the same folds. `scikit-learn MLP, scaled` has a StandardScaler in front, the others get the rows as they are.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from onelaunch.bench.case import OURS
from onelaunch.bench.results import provenance
from onelaunch.bench.tables import TABLES, BenchTable, folds_of
from onelaunch.errors import OnelaunchError, UnsupportedError

MLP, SCALED_MLP, FOREST, BOOSTING = (
    "scikit-learn MLP", "scikit-learn MLP, scaled", "random forest", "hist gradient boosting"
)  # fmt: skip
TREES = (FOREST, BOOSTING)
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


def select_tables(name_contains: str) -> list[BenchTable]:
    chosen = [table for table in TABLES.values() if name_contains in table.name]
    if not chosen:
        raise OnelaunchError(
            f"filter={name_contains!r} is in the name of no table: pass part of one of {', '.join(TABLES)}"
        )
    return chosen


def run_tables(
    tables: Iterable[BenchTable], *, folds: int, command: str, show: Callable[[str, dict[str, Any]], None],
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:  # fmt: skip
    """Run every contender on every table; show and save each table when it is done. Returns the results as JSON values.

    Tables whose package is not installed are named under "left_out", with the reason.
    """
    results: dict[str, Any] = {**provenance(command), "folds": folds, "tables": {}, "left_out": {}}
    for table in tables:
        try:
            result = run_table(table, folds)
        except UnsupportedError as reason:
            results["left_out"][table.name] = str(reason)
            continue
        results["tables"][table.name] = result
        results["summary"] = summarise(results["tables"])
        save(results)
        show(table.name, result)
    return results


def run_table(table: BenchTable, folds: int) -> dict[str, Any]:
    """Errors and fit seconds of each contender by fold, with the size of the table."""
    parts = folds_of(table, folds)
    scores: dict[str, dict[str, list[float]]] = {}
    for name, make in contenders(table.classifies).items():
        errors, seconds = [], []
        for x, y, test_x, test_y in parts:
            estimator = make()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # scikit-learn's MLP says that it has not converged
                begin = time.perf_counter()
                estimator.fit(x, y)
                seconds.append(time.perf_counter() - begin)
            predicted = np.asarray(estimator.predict(test_x))
            wrong = predicted != test_y if table.classifies else np.square(predicted - test_y)
            errors.append(float(wrong.mean() if table.classifies else np.sqrt(wrong.mean())))
        scores[name] = {"errors": errors, "seconds": seconds}
    rows = len(parts[0][0]) + len(parts[0][2])
    return {
        "classifies": table.classifies,
        "unseen": table.unseen,
        "rows": rows,
        "inputs": parts[0][0].shape[1],
        "scores": scores,
    }


def mean_error(result: dict[str, Any], name: str) -> float:
    return float(np.mean(result["scores"][name]["errors"]))


def of_best_tree(result: dict[str, Any]) -> float:
    """Our error over that of the better of random forest and gradient boosting; 1 where both are 0."""
    best = min(mean_error(result, name) for name in TREES)
    ours = mean_error(result, OURS)
    return ours / best if best else (1.0 if ours == 0 else float("inf"))


def summarise(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Mean ranks (1 is best; equal errors share a rank), total fit seconds, and the number of tables near the best tree."""
    from scipy.stats import rankdata

    names = list(next(iter(tables.values()))["scores"])
    errors = np.array([[mean_error(result, name) for name in names] for result in tables.values()])
    ranks = rankdata(errors, axis=1).mean(axis=0)
    seconds = [sum(sum(result["scores"][name]["seconds"]) for result in tables.values()) for name in names]
    near = [name for name, result in tables.items() if of_best_tree(result) <= NEAR]
    unseen = [name for name, result in tables.items() if result["unseen"]]
    return {
        "tables": len(tables), "near_best_tree": len(near), "unseen": len(unseen),
        "unseen_near_best_tree": len(set(near) & set(unseen)), "mean_rank": dict(zip(names, ranks.tolist(), strict=True)),
        "fit_seconds": dict(zip(names, seconds, strict=True)),
    }  # fmt: skip
