"""What `solver` and its parameters mean in scikit-learn: L-BFGS, the rules of the rate, the end by `tol`, rows in order."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import sklearn.neural_network
import torch
from scipy.optimize import check_grad
from sklearn.datasets import load_diabetes, load_iris, make_multilabel_classification
from sklearn.exceptions import ConvergenceWarning
from torch import nn

from onelaunch.errors import DivergedError
from onelaunch.sklearn import MLPClassifier, MLPRegressor, SweepCV
from onelaunch.sklearn.lbfgs import LbfgsSettings, Objective
from onelaunch.sklearn.training import Prepared

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]
IRIS_X, IRIS_Y = load_iris(return_X_y=True)
QUICK = {"hidden_layer_sizes": (8,), "random_state": 0, "device": "cpu"}
LBFGS = {**QUICK, "solver": "lbfgs"}


def objective_of(x: np.ndarray, y: np.ndarray, loss: str, outputs: int, weight: np.ndarray | None, alpha: float):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(x.shape[1], 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    total = len(x) if weight is None else weight.sum()
    prepared = Prepared(x.astype(np.float32), y, weight, outputs, loss, total)
    return Objective(model, prepared, LbfgsSettings(alpha, 10, 100, 1e-4, 0.0, False))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "bce_with_logits"])
def test_the_objective_and_its_gradient_are_scikit_learns(loss, weighted):
    random = np.random.default_rng(0)
    x = random.normal(size=(30, 4)).astype(np.float32).astype(np.float64)
    weight = random.uniform(0.5, 2, 30) if weighted else None
    y: np.ndarray = np.arange(30) % 3
    if loss == "mse":
        y = random.normal(size=(30, 1)).astype(np.float32)
    elif loss == "bce_with_logits":
        y = (random.uniform(size=(30, 3)) > 0.5).astype(np.float32)
    kind = sklearn.neural_network.MLPRegressor if loss == "mse" else sklearn.neural_network.MLPClassifier
    theirs = kind(hidden_layer_sizes=(5,), activation="tanh", solver="lbfgs", alpha=0.3, max_iter=4, random_state=0)
    theirs.fit(x, y.ravel() if loss == "mse" else y.astype(int), sample_weight=weight)
    objective = objective_of(x, y, loss, 1 if loss == "mse" else 3, weight, 0.3)
    parts = [part for pair in zip(theirs.coefs_, theirs.intercepts_, strict=True) for part in pair]
    vector = np.concatenate([part.T.ravel() for part in parts])
    assert objective(vector)[0] == pytest.approx(theirs.loss_, rel=1e-6)
    start = objective.start()
    assert check_grad(lambda v: objective(v)[0], lambda v: objective(v)[1], start) < 1e-5


def test_lbfgs_learns_and_has_the_attributes_of_scikit_learn():
    model = MLPClassifier(**LBFGS, max_iter=50).fit(IRIS_X, IRIS_Y)
    assert model.score(IRIS_X, IRIS_Y) > 0.97
    assert model.n_iter_ == len(model.history_.losses) <= 50
    assert model.loss_ == model.history_.losses[-1] < model.history_.losses[0]
    assert not hasattr(model, "loss_curve_")
    assert not hasattr(model, "partial_fit")
    assert {parameter.dtype for parameter in model.model_.parameters()} == {torch.float64}
    assert model.coefs_[0].dtype == np.float64
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(IRIS_X), model.predict_proba(IRIS_X))
    assert repr(model.history_).startswith("<History:")


def test_lbfgs_takes_targets_of_all_kinds():
    x, y = make_multilabel_classification(100, n_classes=3, random_state=0)
    assert MLPClassifier(**LBFGS).fit(x, y).score(x, y) > 0.9
    x, y = load_diabetes(return_X_y=True)
    both = MLPRegressor(**LBFGS, alpha=0.1).fit(x, np.stack([y, -y], 1))
    assert both.score(x, np.stack([y, -y], 1)) > 0.5
    assert MLPRegressor(**LBFGS, n_estimators=2, layer_norm=True).fit(x, y).score(x, y) > 0.5


def test_an_integer_weight_is_a_repeated_row():
    weight = np.random.default_rng(0).integers(0, 4, len(IRIS_X))
    weighted = MLPClassifier(**LBFGS, alpha=1.0).fit(IRIS_X, IRIS_Y, sample_weight=weight)
    repeated = MLPClassifier(**LBFGS, alpha=1.0).fit(IRIS_X.repeat(weight, axis=0), IRIS_Y.repeat(weight))
    np.testing.assert_array_equal(weighted.predict_proba(IRIS_X), repeated.predict_proba(IRIS_X))
    twice = MLPClassifier(**LBFGS, scale=None, alpha=2.0).fit(IRIS_X.repeat(2, axis=0), IRIS_Y.repeat(2))
    once = MLPClassifier(**LBFGS, scale=None, alpha=1.0).fit(IRIS_X, IRIS_Y)
    np.testing.assert_allclose(twice.predict_proba(IRIS_X), once.predict_proba(IRIS_X))


def test_lbfgs_starts_warm_and_another_solver_goes_on():
    model = MLPClassifier(**LBFGS, warm_start=True, max_iter=5).fit(IRIS_X, IRIS_Y)
    first = model.loss_
    assert model.fit(IRIS_X, IRIS_Y).history_.losses[0] < first
    model.set_params(solver="adam", learning_rate_init=1e-4).partial_fit(IRIS_X, IRIS_Y)
    assert model.loss_ < 2 * first
    assert len(model.loss_curve_) == 1
    assert {parameter.dtype for parameter in model.model_.parameters()} == {torch.float32}


@pytest.mark.parametrize("limit", [{"max_iter": 3}, {"max_fun": 3}])
@pytest.mark.filterwarnings("default::sklearn.exceptions.ConvergenceWarning")
def test_lbfgs_warns_of_its_limits(limit):
    with pytest.warns(ConvergenceWarning, match="lbfgs has not converged after"):
        model = MLPRegressor(**LBFGS, **limit).fit(IRIS_X, IRIS_Y)
    assert model.n_iter_ <= 3


def test_lbfgs_that_is_not_finite_is_one_line():
    with pytest.raises(DivergedError, match=r"^solver='lbfgs' ended with .* not finite: scale X and y down"):
        MLPRegressor(**LBFGS, alpha=1e308).fit(IRIS_X, IRIS_Y)


def test_a_search_trains_each_solver_as_fit_does():
    grid = [
        {"solver": ["lbfgs"], "max_iter": [5]},
        {"solver": ["sgd"], "max_iter": [30], "tol": [0.1]},
        {"solver": [None]},
    ]
    split = [(np.arange(0, 150, 2), np.arange(1, 150, 2))]
    search = SweepCV(MLPClassifier(**QUICK), grid, cv=split, refit=False).fit(IRIS_X, IRIS_Y)
    for parameters, score in zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True):
        alone = MLPClassifier(**QUICK).set_params(**parameters).fit(IRIS_X[::2], IRIS_Y[::2])
        assert alone.score(IRIS_X[1::2], IRIS_Y[1::2]) == score


@pytest.mark.filterwarnings("ignore:One or more of the test scores are non-finite")
def test_an_error_of_one_solver_fails_its_fit_alone():
    split = [(np.arange(0, 150, 2), np.arange(1, 150, 2))]
    grid = {"solver": ["lbfgs", "adam"], "batch_norm": [True], "max_iter": [3]}
    with pytest.warns(RuntimeWarning, match="1 of 2 fits failed .* batch_norm=True does not go with solver='lbfgs'"):
        search = SweepCV(MLPClassifier(**QUICK), grid, cv=split, refit=False).fit(IRIS_X, IRIS_Y)
    assert np.isnan(search.cv_results_["mean_test_score"]).tolist() == [True, False]


def test_adaptive_divides_the_rate_until_it_is_small():
    model = MLPClassifier(**QUICK, solver="sgd", learning_rate="adaptive", tol=10.0, n_iter_no_change=2, max_iter=100)
    model.fit(IRIS_X, IRIS_Y)
    rates = [epoch["lr"] for epoch in model.history_.epochs]
    assert rates[:8] == pytest.approx([4e-3] * 4 + [8e-4] * 3 + [1.6e-4])
    assert (model.n_iter_, model._no_improvement_count) == (1 + 3 * 7, 3)
    assert 1e-6 > model._optimizer.learning_rate > 1e-7


def test_adaptive_follows_the_validation_with_early_stopping():
    model = MLPClassifier(**QUICK, solver="sgd", learning_rate="adaptive", tol=10.0, n_iter_no_change=2, max_iter=10)
    model.set_params(early_stopping=True).fit(IRIS_X, IRIS_Y)
    assert model.n_iter_ == 10
    assert model.history_.epochs[-1]["lr"] < 4e-3


@pytest.mark.parametrize("partial", [False, True])
def test_invscaling_counts_the_rows(partial):
    model = MLPRegressor(**QUICK, solver="sgd", learning_rate="invscaling", power_t=0.25, max_iter=3, batch_size=64)
    for _ in range(3 if partial else 1):
        (model.partial_fit if partial else model.fit)(IRIS_X, IRIS_Y)
    rows = model.t_ / 3
    assert model.history_.epochs[-1]["lr"] == pytest.approx(4e-3 / (2 * rows + 1) ** 0.25)
    assert model._optimizer.learning_rate == pytest.approx(4e-3 / (3 * rows + 1) ** 0.25)


def test_the_rules_of_sgd_are_not_those_of_adam():
    plain, adaptive = (
        MLPRegressor(**QUICK, solver="adam", learning_rate=rate, max_iter=5).fit(IRIS_X, IRIS_Y)
        for rate in ("constant", "adaptive")
    )
    assert adaptive.loss_curve_ == plain.loss_curve_
    assert adaptive.history_.engine != "eager"


def test_rows_are_visited_in_their_order():
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    x[7] = x[2]  # an equal row is not merged
    y = x.sum(axis=1)
    settings = {**QUICK, "solver": "sgd", "learning_rate": "constant", "momentum": 0.0, "alpha": 0.0, "scale": None}
    settings |= {"scale_target": False, "dropout": 0.0, "shuffle": False, "batch_size": 4, "learning_rate_init": 0.1}
    start = MLPRegressor(**settings | {"learning_rate_init": 0.0}, max_iter=1).fit(x, y).model_
    trained = MLPRegressor(**settings, max_iter=2).fit(x, y).model_
    optimizer = torch.optim.SGD(start.parameters(), lr=0.1)
    for _ in range(2):
        for first in (0, 4, 8):
            rows = slice(first, first + 4)
            optimizer.zero_grad()
            nn.functional.mse_loss(start(torch.from_numpy(x[rows]))[:, 0], torch.from_numpy(y[rows])).backward()
            optimizer.step()
    for ours, expected in zip(trained.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.filterwarnings("default::sklearn.exceptions.ConvergenceWarning")
def test_training_ends_by_tol_or_warns():
    settings = {**QUICK, "solver": "adam", "n_iter_no_change": 3}
    with pytest.warns(ConvergenceWarning, match=r"^training ended after max_iter=5 epochs, before it converged by tol"):
        model = MLPClassifier(**settings, max_iter=5, warm_start=True).fit(IRIS_X, IRIS_Y)
    ended = MLPClassifier(**settings, max_iter=100, tol=10.0).fit(IRIS_X, IRIS_Y)
    assert (ended.n_iter_, len(ended.loss_curve_)) == (5, 5)
    assert ended.history_.engine != "eager"
    with pytest.warns(ConvergenceWarning):
        model.set_params(n_iter_no_change=np.inf).fit(IRIS_X, IRIS_Y)
    assert (model.n_iter_, len(model.loss_curve_)) == (5, 10)
    ours = MLPClassifier(**QUICK, tol=10.0, max_iter=20).fit(IRIS_X, IRIS_Y)
    assert ours.n_iter_ == 20


@pytest.mark.parametrize("networks", [1, 2])
def test_each_of_several_networks_ends_by_itself(networks):
    settings = {**QUICK, "solver": "sgd", "max_iter": 40, "tol": 0.05, "n_iter_no_change": 2, "n_estimators": networks}
    model = MLPRegressor(**settings).fit(IRIS_X, IRIS_Y)
    assert len(model.models_) == networks
    assert model.n_iter_ < 40


@pytest.mark.parametrize("solver", [None, "sgd", "lbfgs"])
def test_verbose_prints_one_line_per_iteration(solver, capsys):
    model = MLPClassifier(**QUICK, solver=solver, max_iter=3, verbose=True).fit(IRIS_X, IRIS_Y)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["Iteration 1", "Iteration 2", "Iteration 3"]
    assert lines[-1].endswith(f"loss = {model.loss_:.8f}")
    MLPClassifier(**QUICK, early_stopping=True, max_iter=1, verbose=True).fit(IRIS_X, IRIS_Y)
    assert "Validation score: " in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_and_predictions_have_the_dtype_of_the_rows(dtype):
    x = IRIS_X.astype(dtype)
    model = MLPRegressor(**QUICK, max_iter=2).fit(x, IRIS_Y)
    assert {array.dtype for array in (*model.coefs_, *model.intercepts_, model.predict(x))} == {np.dtype(dtype)}
    large = MLPRegressor(**QUICK, max_iter=2).fit(x, 1e300 * (IRIS_Y + 1))
    assert np.isfinite(large.predict(x)).all()
