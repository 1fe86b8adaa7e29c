"""Every mistake in the arguments of SweepCV is one line that names the argument, of the type that scikit-learn raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV, KFold

from onelaunch.sklearn import MLPClassifier, SweepCV, search_fits

X, Y = load_iris(return_X_y=True)
ESTIMATOR = MLPClassifier((4,), max_iter=1, random_state=0)


class Distribution:
    def rvs(self, random_state: Any = None) -> float:
        return 0.1


GRIDS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, TypeError, r"param_grid=None is not a dict of lists"),
    "text": ("alpha", TypeError, r"param_grid='alpha' is not a dict of lists"),
    "list of names": (["alpha"], TypeError, r"param_grid=\['alpha'\] is not a dict of lists"),
    "no candidate": ([], ValueError, r"param_grid=\[\] leaves nothing to train"),
    "no value": ({"alpha": []}, ValueError, r"param_grid\['alpha'\] is empty"),
    "one number": ({"alpha": 0.1}, TypeError, r"param_grid\['alpha'\]=0.1 is not a list: pass \[0.1\]"),
    "one name": ({"activation": "relu"}, TypeError, r"'relu' is not a list: pass \['relu'\]"),
    "square": ({"alpha": np.ones((2, 2))}, ValueError, r"param_grid\['alpha'\] has shape \[2, 2\]"),
    "key": ({3: [1]}, TypeError, r"param_grid has the key 3"),
    "distribution": ({"alpha": Distribution()}, ValueError, r"param_grid\['alpha'\] is a distribution: pass n_iter="),
    "unknown": ({"alpa": [1]}, ValueError, r"param_grid\['alpa'\] is not a parameter .*did you mean 'alpha'\?"),
    "unknown in one of two": ([{"alpha": [0.1]}, {"zzz": [1]}], ValueError, r"param_grid\['zzz'\] is not a parameter"),
}
ARGUMENTS = {
    "scoring": ({"scoring": "acuracy"}, ValueError, r"scoring='acuracy' is not known.*did you mean 'accuracy'\?"),
    "scoring kind": ({"scoring": 3}, TypeError, r"scoring=3 is not a score"),
    "scoring among several": (
        {"scoring": ["accuracy", "f9"], "refit": False},
        ValueError,
        r"scoring='f9' is not known",
    ),
    "one fold": ({"cv": 1}, ValueError, r"'cv' parameter of SweepCV must be .* Got 1 instead"),
    "text folds": ({"cv": "5"}, ValueError, r"'cv' parameter of SweepCV must be"),
    "many folds": ({"cv": 1000}, ValueError, r"cv=1000 must be from 2 to the number of rows, 150"),
    "no folds": ({"cv": []}, ValueError, r"cv has no split"),
    "numbers as folds": ({"cv": [1, 2]}, TypeError, r"cv\[0\]=1 is not a pair"),
    "rows beyond": (
        {"cv": [([0, 1], [2]), ([0, 999], [1])]},
        ValueError,
        r"cv\[1\] has row 999: X has the rows 0 to 149",
    ),
    "rows of text": ({"cv": [(["a"], [1])]}, TypeError, r"cv\[0\] has \['a'\], which is not a vector of row numbers"),
    "short mask": ({"cv": [(np.ones(3, bool), [1])]}, ValueError, r"cv\[0\] has a mask of 3 rows"),
    "n_iter zero": ({"n_iter": 0}, ValueError, r"n_iter=0 must be 1 or more"),
    "n_iter negative": ({"n_iter": -1}, ValueError, r"n_iter=-1 must be 1 or more"),
    "n_iter text": ({"n_iter": "3"}, TypeError, r"n_iter='3' is not an integer"),
    "n_iter float": ({"n_iter": 2.5}, TypeError, r"n_iter=2.5 is not an integer"),
    "n_jobs": ({"n_jobs": 0}, ValueError, r"n_jobs=0 would train nothing"),
    "n_jobs text": ({"n_jobs": "2"}, TypeError, r"'n_jobs' parameter of SweepCV"),
    "error_score": ({"error_score": "skip"}, ValueError, r"'error_score' parameter of SweepCV"),
    "refit": ({"refit": 3.5}, ValueError, r"'refit' parameter of SweepCV"),
}
ROWS = {
    "no y": ({"y": None}, ValueError, r"requires y to be passed, but the target y is None"),
    "short y": ({"y": Y[:-1]}, ValueError, r"inconsistent numbers of samples"),
    "no rows": ({"X": X[:0], "y": Y[:0]}, ValueError, r"0 sample|cv=5 must be"),
    "weights": (
        {"sample_weight": np.ones(3)},
        ValueError,
        r"sample_weight=.* must have one number for each of the 150",
    ),
    "text as weights": ({"sample_weight": "a"}, ValueError, r"sample_weight='a' must have one number"),
    "groups": ({"groups": np.ones(3)}, ValueError, r"inconsistent numbers of samples"),
}


def refused(kind: type[Exception], message: str, grid: Any, rows: dict[str, Any], **arguments: Any) -> None:
    with pytest.raises(kind, match=message) as caught:
        SweepCV(ESTIMATOR, grid, **arguments).fit(**{"X": X, "y": Y, **rows})
    assert "\n" not in str(caught.value)


@pytest.fixture
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_fits, "train", lambda *_: pytest.fail("trained"))


@pytest.mark.usefixtures("nothing_trains")
class TestBeforeTraining:
    @pytest.mark.parametrize("case", GRIDS)
    def test_grids(self, case):
        grid, kind, message = GRIDS[case]
        refused(kind, message, grid, {})

    @pytest.mark.parametrize("case", ARGUMENTS)
    def test_arguments(self, case):
        arguments, kind, message = ARGUMENTS[case]
        refused(kind, message, {"alpha": [0.1, 0.2]}, {}, **arguments)

    @pytest.mark.parametrize("case", ROWS)
    def test_rows(self, case):
        rows, kind, message = ROWS[case]
        refused(kind, message, {"alpha": [0.1]}, rows, cv=5)


def test_rows_that_the_estimator_refuses_are_one_line():
    bad = X.copy()
    bad[::7, 1] = np.nan
    refused(ValueError, "all 2 fits failed: Input X contains NaN", {"alpha": [0.1]}, {"X": bad}, cv=2)
    refused(ValueError, "all 2 fits failed: Expected 2D array, got 1D", {"alpha": [0.1]}, {"X": X[:, 0]}, cv=2)


@pytest.mark.parametrize("sizes", ["a", (4, "a"), (0,), 2.5, None, ((4, 4),), True], ids=str)
def test_wrong_widths_are_named(sizes):
    refused(ValueError, r"all 2 fits failed: hidden_layer_sizes=", {"hidden_layer_sizes": [sizes]}, {}, cv=2)


def test_a_parameter_of_the_wrong_type_fails_its_candidate_alone():
    found = SweepCV(ESTIMATOR, {"alpha": [0.1, "much"]}, cv=2)
    with pytest.warns(RuntimeWarning, match="2 of 4 fits failed"), pytest.warns(UserWarning, match="non-finite"):
        found.fit(X, Y)
    assert found.best_params_ == {"alpha": 0.1}


@pytest.mark.filterwarnings("ignore:One or more")
def test_a_score_that_raises_is_the_error_score():
    def score(estimator: Any, x: Any, y: Any) -> float:
        if estimator.alpha == 0.1:
            raise ZeroDivisionError("no rows")
        return 1.0

    found = SweepCV(ESTIMATOR, {"alpha": [0.1, 0.2]}, cv=2, scoring=score)
    with pytest.warns(UserWarning, match="scoring raised") as caught:
        found.fit(X, Y)
    messages = [str(each.message) for each in caught]
    assert "scoring raised ZeroDivisionError: no rows: the score is error_score=nan" in messages
    assert not any("fits failed" in message for message in messages)
    assert np.isnan(found.cv_results_["mean_test_score"][0])
    assert found.best_params_ == {"alpha": 0.2}
    with pytest.raises(ZeroDivisionError):
        SweepCV(ESTIMATOR, {"alpha": [0.1]}, cv=2, scoring=score, error_score="raise").fit(X, Y)


def only_many_rows(estimator: Any, x: Any, y: Any) -> float:
    if len(x) < 60:
        raise RuntimeError("few rows")
    return float(estimator.score(x, y))


def named_scores(estimator: Any, x: Any, y: Any) -> dict[str, float]:
    return {"a": only_many_rows(estimator, x, y), "b": 1.0}


@pytest.mark.filterwarnings("ignore:One or more", "ignore:Scoring failed")
@pytest.mark.parametrize("error_score", [np.nan, 0.0])
@pytest.mark.parametrize("refit", [True, "b", False])
def test_scores_that_always_raise_are_those_of_grid_search(refit, error_score):
    scoring = {"a": only_many_rows, "b": "accuracy"} if refit == "b" else only_many_rows
    options: dict[str, Any] = {
        "cv": 3, "scoring": scoring, "refit": refit, "error_score": error_score, "return_train_score": True
    }  # fmt: skip
    ours, theirs = (kind(ESTIMATOR, {"alpha": [0.1, 0.2]}, **options) for kind in (SweepCV, GridSearchCV))
    with pytest.warns(UserWarning, match=r"raised RuntimeError: few rows: .*score is"):
        ours.fit(X, Y)
    theirs.fit(X, Y)
    assert set(ours.cv_results_) == set(theirs.cv_results_)
    for key in (key for key in ours.cv_results_ if "_test_" in key or "_train_" in key):
        np.testing.assert_array_equal(ours.cv_results_[key], theirs.cv_results_[key])
    assert (ours.best_index_, ours.best_params_) == (theirs.best_index_, theirs.best_params_)
    if refit:
        np.testing.assert_array_equal(ours.predict(X), theirs.predict(X))


@pytest.mark.filterwarnings("ignore:One or more")
def test_a_function_of_several_scores_may_raise():
    search = SweepCV(ESTIMATOR, {"alpha": [0.1]}, cv=3, scoring=named_scores, refit="b", return_train_score=True)
    folds = [(np.arange(90), np.arange(90, 150)), (np.arange(60, 150), np.arange(50))]
    with pytest.warns(UserWarning, match="scoring raised RuntimeError: few rows"):
        search.set_params(cv=folds).fit(X, Y)
    found = search.cv_results_
    assert np.isfinite(found["split0_test_a"]).all()
    assert np.isnan(found["split1_test_b"]).all()
    assert np.isfinite(found["mean_train_a"]).all()
    with pytest.raises(RuntimeError, match="few rows"):
        search.set_params(error_score="raise").fit(X, Y)


@pytest.mark.parametrize("error_score", [np.nan, "raise"])
@pytest.mark.parametrize(
    ("score", "message"),
    [
        (None, r"scoring must return a number, got None"),
        ("high", r"scoring must return a number, got 'high'"),
        ([1.0, 2.0], r"scoring must return a number, got \[1\.0, 2\.0\]"),
        ({"a": 1.0, "b": None}, r"scoring\['b'\] must return a number, got None"),
    ],
    ids=str,
)
def test_a_score_that_is_not_a_number_is_refused(score, message, error_score):
    options = {"cv": 2, "refit": False, "scoring": lambda estimator, x, y: score, "error_score": error_score}
    with pytest.raises(ValueError, match=r"scoring must return a number"):
        GridSearchCV(ESTIMATOR, {"alpha": [0.1]}, **options).fit(X, Y)
    refused(ValueError, message, {"alpha": [0.1]}, {}, **options)


def test_one_metric_of_several_may_raise():
    def raises(estimator: Any, x: Any, y: Any) -> float:
        raise ZeroDivisionError("no rows")

    options: dict[str, Any] = {"cv": 2, "scoring": {"good": "accuracy", "bad": raises}, "refit": "good"}
    ours = SweepCV(ESTIMATOR, {"alpha": [0.1]}, **options)
    message = r"scoring\['bad'\] raised ZeroDivisionError: no rows: its score is nan"
    with pytest.warns(UserWarning, match=message), pytest.warns(UserWarning, match="non-finite"):
        ours.fit(X, Y)
    assert np.isnan(ours.cv_results_["mean_test_bad"]).all()
    assert np.isfinite(ours.best_score_)
    with pytest.raises(ZeroDivisionError):
        SweepCV(ESTIMATOR, {"alpha": [0.1]}, error_score="raise", **options).fit(X, Y)


@pytest.mark.parametrize("cv", [
    None, np.int64(2), KFold(2, shuffle=True, random_state=0),
    [(np.arange(0, 150, 2), np.arange(1, 150, 2))], [(np.arange(150) % 3 > 0, np.arange(150) % 3 == 0)],
])  # fmt: skip
def test_every_kind_of_folds_is_that_of_scikit_learn(cv):
    ours = SweepCV(ESTIMATOR, {"alpha": [0.1]}, cv=cv, refit=False).fit(X, Y)
    theirs = GridSearchCV(ESTIMATOR, {"alpha": [0.1]}, cv=cv, refit=False).fit(X, Y)
    np.testing.assert_array_equal(ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"])
