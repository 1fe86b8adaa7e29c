"""`preset="best"`: several networks, each without a part of the rows, and calibrated probabilities."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from onelaunch.errors import OnelaunchError
from onelaunch.sklearn import MLPClassifier, MLPRegressor
from onelaunch.sklearn.presets import PRESETS, left_out, temperature_of
from onelaunch.sklearn.training import Prepared

QUICK = {"max_iter": 4, "hidden_layer_sizes": (8,), "random_state": 0}


def rows_of(classes: np.ndarray, loss: str = "cross_entropy") -> Prepared:
    x = np.arange(len(classes), dtype=np.float32)[:, None]
    return Prepared(x, classes, None, int(classes.max()) + 1, loss, float(len(classes)))


def test_every_row_is_left_out_once_and_classes_in_equal_parts() -> None:
    classes = np.repeat([0, 1, 2], [50, 30, 4])
    parts = left_out(rows_of(classes), 8, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(classes)))
    for label, count in enumerate((50, 30, 4)):
        found = [int((classes[part] == label).sum()) for part in parts]
        assert max(found) - min(found) <= 1, (label, count, found)
    assert [part.tolist() for part in left_out(rows_of(classes), 8, 3)] == [part.tolist() for part in parts]
    assert [part.tolist() for part in left_out(rows_of(classes), 8, 4)] != [part.tolist() for part in parts]


@pytest.mark.parametrize(
    ("rows", "networks", "loss"), [(15, 8, "cross_entropy"), (50, 1, "cross_entropy"), (50, 8, "bce_with_logits")]
)
def test_no_row_is_left_out_where_none_can_be_spared(rows: int, networks: int, loss: str) -> None:
    parts = left_out(rows_of(np.arange(rows) % 2, loss), networks, 0)
    assert [len(part) for part in parts] == [0] * networks


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_temperature_of_logits_is_found(temperature: float) -> None:
    random = np.random.default_rng(0)
    exact = random.normal(size=(40_000, 3)) * 2
    chances = np.exp(exact) / np.exp(exact).sum(axis=1, keepdims=True)
    labels = (chances.cumsum(axis=1) > random.random((len(exact), 1))).argmax(axis=1)
    halves = np.array_split(np.arange(len(exact)), 2)
    logits, targets = [exact[half] * temperature for half in halves], [labels[half] for half in halves]
    found = temperature_of(logits, targets, [np.ones(len(half)) for half in halves])
    assert found == pytest.approx(temperature, rel=0.03)


def test_weights_count_in_the_temperature() -> None:
    logits, labels = np.array([[4.0, 0.0], [4.0, 0.0]]), np.array([0, 1])
    certain, unsure = (temperature_of([logits], [labels], [np.array(weight)]) for weight in ([50.0, 1.0], [1.0, 1.0]))
    assert certain < unsure


def test_probabilities_are_calibrated() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x, y, random_state=1, test_size=0.4)
    losses = [
        log_loss(test_y, MLPClassifier(preset=preset, random_state=0).fit(train_x, train_y).predict_proba(test_x))
        for preset in PRESETS
    ]
    assert losses[1] < 0.9 * losses[0]


def test_the_networks_of_a_regressor_keep_their_best_epochs() -> None:
    x, y = load_diabetes(return_X_y=True)
    found = MLPRegressor(preset="best", **{**QUICK, "max_iter": 60, "learning_rate_init": 0.02}).fit(x, y)
    assert len(found.models_) == 8
    assert not hasattr(found, "temperature_")
    assert found.n_iter_ == 60  # the schedule ends in any case
    losses = [epoch["validation"]["loss"] for epoch in found.history_.epochs]
    prepared = found._prepare(x, y)
    rows = found._left_out(prepared)[0]
    with torch.no_grad():
        outputs = found.models_[0](torch.from_numpy(prepared.x[rows])).numpy()
    assert np.square(outputs - prepared.y[rows]).mean() == pytest.approx(min(losses), rel=1e-3)
    assert min(losses) < losses[-1]


def test_parameters_that_are_set_count() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    found = MLPClassifier(preset="best", n_estimators=3, label_smoothing=0.3, **QUICK).fit(x, y)
    assert len(found.models_) == 3
    assert found.n_iter_ == 4
    assert found._options(100, "cross_entropy", None)["label_smoothing"] == 0.3
    plain = MLPClassifier(**QUICK).fit(x, y)
    assert plain.temperature_ == 1.0
    assert len(plain.models_) == 1


def test_the_same_seed_gives_the_same_bits_and_a_copy_predicts_alike() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    first = MLPClassifier(preset="best", batch_norm=True, **QUICK).fit(x, y)
    second = clone(first).fit(x, y)
    expected = first.predict_proba(x)
    np.testing.assert_array_equal(second.predict_proba(x), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(first)).predict_proba(x), expected)
    np.testing.assert_allclose(expected.sum(axis=1), 1)


def test_few_rows_a_rare_class_weights_and_several_labels() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3))
    for y in (np.arange(40) % 2, np.repeat([0, 1, 2], [20, 19, 1]), np.eye(3, dtype=int)[np.arange(40) % 3]):
        for rows in (40, 6):
            if y.ndim == 1 and len(np.unique(y[:rows])) < 2:
                continue
            found = MLPClassifier(preset="best", **QUICK).fit(
                x[:rows], y[:rows], sample_weight=random.random(rows) + 0.1
            )
            assert np.isfinite(found.predict_proba(x)).all()


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({"preset": "fastest"}, "fit", "preset='fastest'"),
        ({"solver": "lbfgs"}, "fit", "does not go with solver='lbfgs'"),
        ({"warm_start": True}, "fit", "does not go with warm_start=True"),
        ({}, "partial_fit", "call fit instead of partial_fit"),
    ],
)
def test_what_does_not_go_with_it(options: dict, call: str, words: str) -> None:
    x, y = load_diabetes(return_X_y=True)
    with pytest.raises(OnelaunchError, match=words):
        getattr(MLPRegressor(**{"preset": "best", **options}), call)(x, y)
