"""Errors of a fit name the parameters of the estimator, not the arguments of `ol.fit` that they become."""

from __future__ import annotations

import warnings

import pytest
from sklearn.datasets import load_iris

from onelaunch.errors import DivergedError, OnelaunchError
from onelaunch.run.options import Options
from onelaunch.sklearn import MLPClassifier, SweepCV
from onelaunch.sklearn.parameter_names import PARAMETERS, in_parameters

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = {"hidden_layer_sizes": (8,), "max_iter": 2, "random_state": 0, "device": "cpu", "engine": "eager"}
IRIS_X, IRIS_Y = load_iris(return_X_y=True)
MISTAKES = [
    ({"max_iter": 0}, "max_iter=0 must be 1 or more"),
    ({"max_iter": 2.5}, "max_iter=2.5 is not an integer"),
    ({"learning_rate_init": -1}, "learning_rate_init=-1 must be a finite number"),
    ({"alpha": None}, "alpha=None is not a number"),
    ({"beta_1": 1.0}, "beta_1=1.0 must be a finite number, 0 or more and below 1"),
    ({"beta_2": "x"}, "beta_2='x' is not a number"),
    ({"epsilon": -1}, "epsilon=-1 must be a finite number"),
    ({"solver": "sgd", "momentum": "x"}, "momentum='x' is not a number"),
    ({"early_stopping": True, "n_iter_no_change": 0}, "n_iter_no_change=0 must be 1 or more epochs"),
    ({"early_stopping": True, "tol": "x"}, "tol='x' must be a finite number"),
    (
        {"batch_norm": True, "batch_size": 1},
        "batch_size=1 leaves a batch of one row among 149.*: pass another batch_size$",
    ),
    ({"optimizer": "eps"}, "optimizer='eps' is not known"),
]


@pytest.mark.parametrize("networks", [1, 2])
@pytest.mark.parametrize(("parameters", "message"), MISTAKES)
def test_a_mistake_is_named_as_the_user_wrote_it(parameters, message, networks):
    with pytest.raises(OnelaunchError, match=f"^{message}"):
        MLPClassifier(**(QUICK | parameters), n_estimators=networks).fit(IRIS_X, IRIS_Y)


@pytest.mark.parametrize("networks", [1, 2])
def test_a_run_that_diverges_says_which_parameter_to_change(networks):
    model = MLPClassifier(**QUICK, optimizer="sgd", learning_rate_init=1e30, n_estimators=networks)
    with pytest.raises(DivergedError, match=r"pass a smaller learning_rate_init$"):
        model.fit(IRIS_X, IRIS_Y)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"max_iter": [2, 0]}, "max_iter=0 must be 1 or more"),
        ({"learning_rate_init": [1e-3, 1e30], "optimizer": ["sgd"]}, "pass a smaller learning_rate_init"),
    ],
)
def test_a_search_names_the_parameters_too(grid, message):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SweepCV(MLPClassifier(**QUICK), grid, cv=2).fit(IRIS_X, IRIS_Y)
    assert message in str(caught[0].message)


def test_every_translated_name_is_one_of_fit_and_becomes_a_parameter():
    """A renamed option of `fit` must not leave its old name here."""
    for theirs, ours in PARAMETERS.items():
        assert theirs.split("=")[0].split("[")[0].split(".")[0] in Options.__dataclass_fields__
        assert ours.strip("=").split()[-1] in MLPClassifier().get_params()


def test_words_and_values_stay():
    assert in_parameters("schedule='lr' is not known: 3 epochs, steps") == "schedule='lr' is not known: 3 epochs, steps"
