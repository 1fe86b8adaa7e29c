"""A parameter of an estimator that is not valid is refused in one line, before anything is trained or allocated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from onelaunch.errors import OnelaunchError
from onelaunch.sklearn import MLPClassifier, MLPRegressor

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = {"hidden_layer_sizes": (8,), "max_iter": 2, "random_state": 0, "device": "cpu", "engine": "eager"}
IRIS_X, IRIS_Y = load_iris(return_X_y=True)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"activation": "rely"}, "activation='rely' is not known.*did you mean 'relu'"),
        ({"hidden_layer_sizes": (8, 0)}, r"hidden_layer_sizes=\(8, 0\) must be widths of 1 or more"),
        ({"batch_size": "many"}, "batch_size='many' is not an integer"),
        ({"batch_size": 0, "max_iter": "auto"}, "batch_size=0 must be 1 or more, or 'auto'"),
        ({"scale": "minmax"}, "scale='minmax' is not known"),
        ({"device": "tpu"}, "device='tpu' is not known"),
        ({"n_estimators": 0}, "n_estimators=0 must be 1 or more"),
        ({"early_stopping": "sometimes"}, "early_stopping='sometimes' is not known"),
        ({"solver": "lbfg"}, "solver='lbfg' is not known: .*; did you mean 'lbfgs'"),
        (
            {"solver": "lbfgs", "batch_norm": True},
            "batch_norm=True does not go with solver='lbfgs': pass layer_norm=True",
        ),
        (
            {"solver": "lbfgs", "dropout": 0.5},
            r"dropout=0\.5 does not go with solver='lbfgs': pass 0, or solver='adam'",
        ),
        ({"solver": "lbfgs", "max_iter": 0}, "max_iter=0 must be 1 or more"),
        ({"solver": "lbfgs", "max_iter": 2.5}, "max_iter=2.5 is not an integer"),
        ({"solver": "lbfgs", "alpha": -1}, "alpha=-1 must be a finite number, 0 or more"),
        ({"max_fun": 0}, "max_fun=0 must be 1 or more"),
        ({"power_t": -1}, "power_t=-1 must be a finite number, 0 or more"),
        ({"solver": "adamm"}, "solver='adamm' is not known: .*; did you mean 'adam'"),
        ({"learning_rate": "adapt"}, "learning_rate='adapt' is not known: .*; did you mean 'adaptive'"),
        ({"shuffle": False, "engine": "cpu"}, "engine='cpu' does not go with shuffle=False: pass engine='auto'"),
        (
            {"solver": "sgd", "learning_rate": "adaptive", "engine": "cpu"},
            "engine='cpu' does not go with learning_rate='adaptive': pass engine='auto'",
        ),
        ({"batch_norm": True, "layer_norm": True}, "pass one of the two"),
        (
            {"class_weight": {0: 1, 1: -5, 2: 1}},
            "class_weight={0: 1, 1: -5, 2: 1}: pass weights that are finite numbers, 0",
        ),
        ({"class_weight": {0: 1, 1: float("nan"), 2: 1}}, "class_weight=.*: pass weights that are finite numbers, 0"),
        ({"class_weight": "bal"}, "class_weight='bal' is not known: pass one of 'balanced', or a dict"),
        ({"verbose": "x"}, "verbose='x' must be True, False or an integer"),
        ({"n_iter_no_change": 0}, "n_iter_no_change=0 must be 1 or more"),
        ({"tol": -1}, "tol=-1 must be a finite number, 0 or more"),
        ({"batch_norm": "yes"}, "batch_norm='yes' must be True or False"),
        ({"layer_norm": 1}, "layer_norm=1 must be True or False"),
        ({"shuffle": "no"}, "shuffle='no' must be True or False"),
        ({"warm_start": None}, "warm_start=None must be True or False"),
        ({"nesterovs_momentum": "yes"}, "nesterovs_momentum='yes' must be True or False"),
        (
            {"early_stopping": 5},
            "early_stopping=5 must be True, False or 'auto': pass a number of epochs as n_iter_no_",
        ),
        ({"validation_fraction": 1}, "validation_fraction=1 must be a fraction between 0 and 1, such as 0.1"),
        ({"validation_fraction": "x"}, "validation_fraction='x' must be a fraction between 0 and 1, such as 0.1"),
        ({"activation": ["relu"]}, r"activation=\['relu'\] is of type list, not a name"),
        ({"dropout": None}, "dropout=None must be a number, 0 or more and below 1"),
        ({"dropout": 1.0}, r"dropout=1\.0 must be a number, 0 or more and below 1"),
        *(() if torch.cuda.is_available() else (({"device": "cuda"}, "device='cuda', but this machine has no CUDA"),)),
    ],
)
def test_a_bad_parameter_is_one_line(parameters, message):
    with pytest.raises(OnelaunchError, match=message) as caught:
        MLPClassifier(**(QUICK | parameters)).fit(IRIS_X, IRIS_Y)
    assert "\n" not in str(caught.value)


def test_a_switch_of_numpys_is_a_switch():
    model = MLPClassifier(**QUICK, layer_norm=np.bool_(True), early_stopping=np.bool_(False)).fit(IRIS_X, IRIS_Y)
    assert isinstance(model.model_[2], torch.nn.LayerNorm)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"hidden_layer_sizes": 10**9},
            r"^hidden_layer_sizes=1000000000 does not fit into memory "
            r"\(8,000,000,003 parameters take 119 GiB, 8\.00 GiB are free\): pass smaller widths$",
        ),
        ({"hidden_layer_sizes": 10**400}, "more than 10\\*\\*15 parameters take over 1.49e\\+07 GiB"),
        (
            {"n_estimators": 10**9},
            r"with n_estimators=1000000000 does not fit .*: pass smaller widths or fewer networks$",
        ),
    ],
)
def test_a_network_larger_than_the_memory_is_refused_before_it_is_made(monkeypatch, parameters, message):
    monkeypatch.setattr("onelaunch.train.memory.free_memory", lambda: 2**33)
    monkeypatch.setattr("onelaunch.sklearn.networks.mlp", lambda *arguments, **options: pytest.fail("made"))
    with pytest.raises(OnelaunchError, match=message):
        MLPClassifier(**(QUICK | parameters)).fit(IRIS_X, IRIS_Y)


def test_a_last_batch_of_one_row_beside_held_out_rows_is_left_out():
    """149 different rows, of which 15 are held out: batches of 133 leave one row, which BatchNorm1d cannot normalise."""
    model = MLPClassifier(**QUICK, batch_norm=True, batch_size=133, early_stopping=True)
    assert model.fit(IRIS_X, IRIS_Y).n_iter_ == 2


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_targets_of_any_size_are_learned(scale):
    plain, scaled = (MLPRegressor(**QUICK).fit(IRIS_X, factor * (IRIS_Y + 1.0)) for factor in (1.0, scale))
    np.testing.assert_allclose(scaled.predict(IRIS_X) / scale, plain.predict(IRIS_X), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce")  # scikit-learn's own check sums y
def test_targets_that_overflow_are_not_called_nan():
    message = r"^y has the value 1e\+300, too large for float32: scale it down, or leave scale_target=True$"
    with pytest.raises(OnelaunchError, match=message):
        MLPRegressor(**QUICK, scale_target=False).fit(IRIS_X, 1e300 * (IRIS_Y + 1.0))
    with pytest.raises(
        OnelaunchError, match=r"^y has values up to 1\.7e\+308, whose sum is not a finite number: scale"
    ):
        MLPRegressor(**QUICK).fit(IRIS_X, 1.7e308 * (IRIS_Y - 1.0))
    with pytest.raises(OnelaunchError, match=r"^X has the value 1e\+300, too large .*, or leave scale='robust'$"):
        MLPRegressor(**QUICK, scale=None).fit(IRIS_X + 1e300, IRIS_Y)


def test_the_scaling_of_targets_is_a_switch():
    with pytest.raises(OnelaunchError, match=r"^scale_target='no' must be True or False$"):
        MLPRegressor(**QUICK, scale_target="no").fit(IRIS_X, IRIS_Y)
