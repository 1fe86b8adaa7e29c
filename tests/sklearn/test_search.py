"""SweepCV agrees with GridSearchCV over the same estimator: the same scores, to the same bits, and the same attributes."""

from __future__ import annotations

from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris
from sklearn.metrics import accuracy_score, make_scorer
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, RandomizedSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from onelaunch.errors import OnelaunchError
from onelaunch.sklearn import MLPClassifier, MLPRegressor, SweepCV

X, Y = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[Y]
ESTIMATOR = MLPClassifier((6,), max_iter=3, random_state=0)
GRID: dict[str, Any] = {"learning_rate_init": [1e-3, 3e-2], "hidden_layer_sizes": [(4,), (6, 5)], "dropout": [0.0, 0.2]}


def scores(search: Any, name: str = "score", splits: int = 3) -> np.ndarray:
    return np.array([search.cv_results_[f"split{split}_test_{name}"] for split in range(splits)])


def test_scores_and_attributes_are_those_of_grid_search():
    ours = SweepCV(ESTIMATOR, GRID, cv=3, return_train_score=True).fit(X, NAMES)
    theirs = GridSearchCV(ESTIMATOR, GRID, cv=3, return_train_score=True).fit(X, NAMES)
    np.testing.assert_array_equal(scores(ours), scores(theirs))
    assert set(theirs.cv_results_) == set(ours.cv_results_)
    np.testing.assert_array_equal(ours.cv_results_["mean_train_score"], theirs.cv_results_["mean_train_score"])
    assert ours.best_params_ == theirs.best_params_
    assert (ours.best_index_, ours.best_score_, ours.n_splits_) == (theirs.best_index_, theirs.best_score_, 3)
    np.testing.assert_array_equal(ours.predict_proba(X), theirs.predict_proba(X))
    assert list(ours.classes_) == list(theirs.classes_)
    assert ours.score(X, NAMES) == theirs.score(X, NAMES)
    assert not hasattr(ESTIMATOR, "models_")


def test_parameters_of_the_rows_and_ensembles_may_differ():
    grid = {
        "scale": [None, "robust"],
        "class_weight": [None, {"setosa": 3.0}],
        "n_estimators": [1, 2],
        "batch_size": [16],
    }
    ours = SweepCV(ESTIMATOR, grid, cv=3).fit(X, NAMES)
    theirs = GridSearchCV(ESTIMATOR, grid, cv=3).fit(X, NAMES)
    np.testing.assert_array_equal(scores(ours), scores(theirs))


def test_several_metrics_a_regressor_and_weights():
    x, y = load_diabetes(return_X_y=True)
    weights = np.linspace(0.1, 2, len(y))
    estimator = MLPRegressor((5,), max_iter=2, random_state=1)
    arguments: dict[str, Any] = {"scoring": ["r2", "neg_mean_absolute_error"], "refit": "r2", "cv": KFold(3)}
    ours = SweepCV(estimator, {"alpha": [0.0, 0.1]}, **arguments).fit(x, y, sample_weight=weights)
    theirs = GridSearchCV(estimator, {"alpha": [0.0, 0.1]}, **arguments).fit(x, y, sample_weight=weights)
    for name in arguments["scoring"]:
        np.testing.assert_array_equal(scores(ours, name), scores(theirs, name))
    assert ours.multimetric_
    np.testing.assert_array_equal(ours.predict(x), theirs.predict(x))


def test_the_scaling_of_targets_may_differ():
    x, y = load_diabetes(return_X_y=True)
    estimator, grid = MLPRegressor((5,), max_iter=2, random_state=1), {"scale_target": [True, False], "scale": [None]}
    ours, theirs = (search(estimator, grid, cv=3, refit=False).fit(x, y) for search in (SweepCV, GridSearchCV))
    np.testing.assert_array_equal(scores(ours), scores(theirs))


@pytest.mark.parametrize("n_jobs", [None, 2])
@pytest.mark.parametrize(("fits", "scored"), [(False, True), (True, False), (True, True)])
def test_metadata_routing_says_where_weights_go(fits, scored, n_jobs):
    weights = np.linspace(0, 1, len(Y))
    with config_context(enable_metadata_routing=True):
        estimator = clone(ESTIMATOR).set_fit_request(sample_weight=fits).set_score_request(sample_weight=scored)
        several = {name: make_scorer(accuracy_score) for name in "ab"}
        several["a"].set_score_request(sample_weight=scored)
        several["b"].set_score_request(sample_weight=not scored)
        for scoring in (None, several):
            options: dict[str, Any] = {"scoring": scoring, "refit": "a" if scoring else True, "cv": 2}
            with joblib.parallel_config("threading"):
                ours = SweepCV(estimator, {"alpha": [0.0, 0.1]}, n_jobs=n_jobs, **options)
                ours.fit(X, Y, sample_weight=weights)
            theirs = GridSearchCV(estimator, {"alpha": [0.0, 0.1]}, **options).fit(X, Y, sample_weight=weights)
            for name in scoring or ("score",):
                np.testing.assert_array_equal(scores(ours, name, 2), scores(theirs, name, 2))
            np.testing.assert_array_equal(ours.predict_proba(X), theirs.predict_proba(X))


def test_random_candidates_and_groups():
    groups = np.arange(len(X)) % 7
    arguments: dict[str, Any] = {"n_iter": 3, "random_state": 4, "cv": GroupKFold(3)}
    ours = SweepCV(ESTIMATOR, GRID, **arguments).fit(X, Y, groups=groups)
    theirs = RandomizedSearchCV(ESTIMATOR, GRID, **arguments).fit(X, Y, groups=groups)
    assert ours.cv_results_["params"] == theirs.cv_results_["params"]
    np.testing.assert_array_equal(scores(ours), scores(theirs))


def test_early_stopping_is_that_of_a_single_fit():
    estimator = clone(ESTIMATOR).set_params(early_stopping=True, max_iter=6)
    ours = SweepCV(estimator, {"alpha": [0.0, 0.1]}, cv=2, refit=False).fit(X, Y)
    theirs = GridSearchCV(estimator, {"alpha": [0.0, 0.1]}, cv=2, refit=False).fit(X, Y)
    np.testing.assert_array_equal(scores(ours, splits=2), scores(theirs, splits=2))
    assert not hasattr(ours, "best_estimator_")


def test_a_failing_candidate_gets_the_error_score():
    grid = {"learning_rate_init": [1e-3, 1e30], "optimizer": ["sgd"], "scale": [None]}
    search = SweepCV(ESTIMATOR, grid, cv=2)
    with pytest.warns(RuntimeWarning, match="2 of 4 fits failed"), pytest.warns(UserWarning, match="non-finite"):
        search.fit(X * 100, Y)
    assert np.isnan(search.cv_results_["mean_test_score"][1])
    assert search.best_index_ == 0
    with pytest.raises(ValueError, match="smaller learning_rate_init"):
        SweepCV(ESTIMATOR, grid, cv=2, error_score="raise").fit(X * 100, Y)
    with pytest.raises(ValueError, match="all 2 fits failed"):
        SweepCV(ESTIMATOR, {"optimizer": ["nothing"]}, cv=2).fit(X, Y)


def test_other_estimators_are_refused():
    with pytest.raises(OnelaunchError, match="use scikit-learn's GridSearchCV"):
        SweepCV(SVC(), {"C": [1]}).fit(X, Y)
    with pytest.raises(OnelaunchError, match=r"^estimator=Pipeline is not .*: put SweepCV inside the pipeline[^\n]*$"):
        SweepCV(make_pipeline(StandardScaler(), ESTIMATOR), {"alpha": [1]}).fit(X, Y)


@pytest.mark.parametrize("backend", ["threading", "loky"])
def test_chunks_through_joblib_have_the_same_scores(backend):
    grid = {"alpha": [0.0, 0.1, 0.2]}
    with joblib.parallel_config(backend):
        ours = SweepCV(ESTIMATOR, grid, cv=2, n_jobs=2).fit(X, Y)
    np.testing.assert_array_equal(scores(ours, splits=2), scores(SweepCV(ESTIMATOR, grid, cv=2).fit(X, Y), splits=2))


def test_jobs_give_the_networks_of_this_process():
    """Workers have fewer threads; large networks keep the partitions that they have here."""
    estimator = MLPClassifier((512, 512), max_iter=2, batch_size=64, random_state=0, engine="cpu")
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for n_jobs in (None, 2):
            search = SweepCV(estimator, {"alpha": [0.0]}, cv=2, n_jobs=n_jobs, scoring="neg_log_loss", refit=False)
            found.append(scores(search.fit(X, Y), splits=2))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(*found)


def test_a_local_dask_cluster():
    distributed = pytest.importorskip("distributed")
    grid = {"alpha": [0.0, 0.1, 0.2]}
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config("dask"),
    ):
        ours = SweepCV(ESTIMATOR, grid, cv=2, n_jobs=2).fit(X, Y)
    np.testing.assert_array_equal(scores(ours, splits=2), scores(SweepCV(ESTIMATOR, grid, cv=2).fit(X, Y), splits=2))
