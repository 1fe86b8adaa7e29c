"""Later calls on a fitted estimator, by `partial_fit` and `warm_start`: random numbers go on, changes are applied or named."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_iris
from torch import nn

from onelaunch.errors import OnelaunchError
from onelaunch.sklearn import MLPClassifier, MLPRegressor

pytestmark = pytest.mark.usefixtures("one_thread")
IRIS_X, IRIS_Y = load_iris(return_X_y=True)
QUICK = {"hidden_layer_sizes": (40,), "activation": "tanh", "random_state": 0, "alpha": 0.0, "device": "cpu"}
STILL = {**QUICK, "learning_rate_init": 0.0, "max_iter": 3}  # its losses depend on masks and rows alone


def by_single_rows(model: MLPClassifier, calls: int) -> MLPClassifier:
    for row in range(calls):
        model.partial_fit(IRIS_X[row : row + 1], IRIS_Y[row : row + 1], classes=[0, 1, 2])
    return model


@pytest.mark.parametrize("engine", ["auto", "eager"])
def test_every_hidden_unit_is_trained_by_calls_with_one_row(engine):
    model = MLPClassifier(**QUICK, engine=engine, scale=None)
    first = by_single_rows(model, 1).coefs_[1]
    trained = (by_single_rows(model, 12).coefs_[1] != first).all(axis=1)
    assert trained.all(), f"{(~trained).sum()} of 40 units had the same mask in every call"


@pytest.mark.parametrize("solver", [None, "sgd"])
def test_the_same_calls_give_the_same_bits(solver):
    one, other = (by_single_rows(MLPClassifier(**QUICK, solver=solver), 5) for _ in range(2))
    np.testing.assert_array_equal(one.coefs_[0], other.coefs_[0])
    different = by_single_rows(MLPClassifier(**QUICK | {"random_state": 1}, solver=solver), 5)
    assert not np.array_equal(one.coefs_[0], different.coefs_[0])


def test_the_first_call_is_that_of_fit():
    settings = {**QUICK, "schedule": "constant", "max_iter": 1}
    fitted = MLPClassifier(**settings).fit(IRIS_X, IRIS_Y)
    partial = MLPClassifier(**settings).partial_fit(IRIS_X, IRIS_Y, classes=[0, 1, 2])
    np.testing.assert_array_equal(fitted.coefs_[0], partial.coefs_[0])


@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_a_warm_start_goes_on_with_other_masks(kind):
    model = kind(**STILL, warm_start=True, schedule="constant")
    for _ in range(3):
        model.fit(IRIS_X, IRIS_Y)
    assert len(set(model.loss_curve_)) == 9
    again = clone(model)
    for _ in range(3):
        again.fit(IRIS_X, IRIS_Y)
    assert again.loss_curve_ == model.loss_curve_


@pytest.mark.parametrize("networks", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_warm_start_holds_out_the_same_rows(networks, weighted):
    model = MLPClassifier(**STILL, warm_start=True, early_stopping=True, n_estimators=networks)
    weight = np.linspace(0.5, 2, len(IRIS_X)) if weighted else None
    losses = []
    for _ in range(2):
        model.fit(IRIS_X, IRIS_Y, weight)
        losses.append([epoch["validation"]["loss"] for epoch in model.history_.epochs])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.parametrize("norm", [{}, {"layer_norm": True}])
def test_a_changed_dropout_is_applied(norm):
    model = MLPRegressor(**STILL, **norm).partial_fit(IRIS_X, IRIS_Y)
    expected = model.predict(IRIS_X)
    for dropout in (0.5, 0.0, 0.3):
        model.set_params(dropout=dropout).partial_fit(IRIS_X, IRIS_Y)
        assert [module.p for module in model.model_ if isinstance(module, nn.Dropout)] == [dropout] * (dropout > 0)
        np.testing.assert_array_equal(model.predict(IRIS_X), expected)
    made = MLPRegressor(**STILL, **norm, dropout=0.3).partial_fit(IRIS_X, IRIS_Y)
    assert str(made.model_) == str(model.model_)


CHANGES = [
    (
        {"hidden_layer_sizes": (8, 8)},
        r"hidden_layer_sizes=\(8, 8\) differs from \(40,\), with which the network was made",
    ),
    ({"activation": "relu"}, "activation='relu' differs from 'tanh'"),
    ({"batch_norm": True}, "batch_norm=True differs from False"),
    ({"layer_norm": True}, "layer_norm=True differs from False"),
    ({"scale": None}, "scale=None differs from 'robust'"),
    ({"scale_target": False}, "scale_target=False differs from True"),
    ({"n_estimators": 2}, "n_estimators=2 differs from 1"),
]


@pytest.mark.parametrize(("changed", "message"), CHANGES)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_a_changed_network_is_one_line(changed, message, method):
    model = MLPRegressor(**STILL, warm_start=True).fit(IRIS_X, IRIS_Y)
    expected = model.predict(IRIS_X)
    model.set_params(**changed)
    with pytest.raises(OnelaunchError, match=f"^{message}.*: set it back, or call fit with warm_start=False") as caught:
        getattr(model, method)(IRIS_X, IRIS_Y)
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(model.predict(IRIS_X), expected)
    model.set_params(warm_start=False).fit(IRIS_X, IRIS_Y)


def test_another_way_to_write_the_same_widths_is_no_change():
    model = MLPRegressor(**STILL).partial_fit(IRIS_X, IRIS_Y)
    model.set_params(hidden_layer_sizes=np.array([40])).partial_fit(IRIS_X, IRIS_Y)
    model.set_params(hidden_layer_sizes=40).partial_fit(IRIS_X, IRIS_Y)


def test_partial_fit_refuses_early_stopping():
    with pytest.raises(
        OnelaunchError, match=r"^partial_fit does not support early_stopping=True: pass False, or 'auto'$"
    ):
        MLPRegressor(**STILL, early_stopping=True).partial_fit(IRIS_X, IRIS_Y)


@pytest.mark.parametrize("kind", [MLPClassifier, MLPRegressor])
def test_an_estimator_of_an_earlier_version_goes_on(kind):
    model = kind(**STILL).fit(IRIS_X, IRIS_Y)
    later = {"power_t", "max_fun", "_calls", "_first_seeds", "_architecture", "_rules", "_dtype"}
    again = kind.__new__(kind)
    again.__setstate__({name: value for name, value in vars(model).items() if name not in later})
    assert again.partial_fit(IRIS_X, IRIS_Y).n_iter_ == 4
    again.set_params(warm_start=True, early_stopping=True, dropout=0.1).fit(IRIS_X, IRIS_Y)
    assert again.predict(IRIS_X).shape == (150,)
