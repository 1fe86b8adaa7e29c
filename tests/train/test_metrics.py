"""The validation metrics are scikit-learn's, computed from the trained model's outputs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics
from torch import nn

import onelaunch as ol
from onelaunch.run.metric_names import CLASS_METRICS, VALUE_METRICS
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("one_thread")


def run(loss, outputs, names, x, y, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, outputs))
    held = (x[:60], y[:60])
    history = ol.fit(
        model, x, y, epochs=2, loss=loss, validation=held, metrics=names, engine="cpu", progress=False, **options
    )
    assert list(history.epochs[0]["validation"]) == ["loss", "accuracy", *names]
    return model, history.epochs[-1]["validation"]


@pytest.mark.parametrize("outputs", [2, 4])
def test_metrics_of_classes(outputs):
    x, y = problem("cross_entropy", outputs=outputs)
    model, found = run("cross_entropy", outputs, CLASS_METRICS, x, y)
    true, chosen, p = y[:60].numpy(), ol.predict(model, x[:60]), ol.predict(model, x[:60], probabilities=True)
    average = "binary" if outputs == 2 else "macro"
    scores = p[:, 1] if outputs == 2 else p
    one_hot = true if outputs == 2 else np.eye(outputs)[true]
    expected = {
        "accuracy": metrics.accuracy_score(true, chosen),
        "balanced_accuracy": metrics.balanced_accuracy_score(true, chosen),
        "f1": metrics.f1_score(true, chosen, average=average),
        "f1_macro": metrics.f1_score(true, chosen, average="macro"),
        "f1_micro": metrics.f1_score(true, chosen, average="micro"),
        "f1_weighted": metrics.f1_score(true, chosen, average="weighted"),
        "precision": metrics.precision_score(true, chosen, average=average, zero_division=0),
        "recall": metrics.recall_score(true, chosen, average=average),
        "roc_auc": metrics.roc_auc_score(one_hot, scores),
        "average_precision": metrics.average_precision_score(one_hot, scores),
        "log_loss": metrics.log_loss(true, p.astype(np.float64) / p.sum(1, keepdims=True, dtype=np.float64)),
        "matthews_corrcoef": metrics.matthews_corrcoef(true, chosen),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert found["log_loss"] == pytest.approx(found["loss"], rel=1e-5)


@pytest.mark.parametrize("outputs", [1, 3])
def test_metrics_of_values(outputs):
    x, y = problem("mse", outputs=outputs)
    model, found = run("mse", outputs, VALUE_METRICS, x, y)
    true, values = y[:60].numpy(), ol.predict(model, x[:60])
    expected = {
        "r2": metrics.r2_score(true, values),
        "rmse": metrics.root_mean_squared_error(true, values),
        "mae": metrics.mean_absolute_error(true, values),
        "mse": metrics.mean_squared_error(true, values),
        "median_absolute_error": metrics.median_absolute_error(true, values),
        "explained_variance": metrics.explained_variance_score(true, values),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_metrics_of_several_labels_are_means_over_them():
    x, y = problem("bce_with_logits", outputs=3)
    model, found = run("bce_with_logits", 3, ("f1", "roc_auc"), x, y)
    true, chosen, p = y[:60].numpy(), ol.predict(model, x[:60]), ol.predict(model, x[:60], probabilities=True)
    assert found["f1"] == pytest.approx(metrics.f1_score(true, chosen, average="macro"), rel=1e-5)
    assert found["roc_auc"] == pytest.approx(metrics.roc_auc_score(true, p, average="macro"), rel=1e-5)


def test_what_the_rows_do_not_define_is_nan():
    x, y = problem("cross_entropy", outputs=2)
    y[:60] = 1
    _, found = run("cross_entropy", 2, ("roc_auc", "f1"), x, y)
    assert math.isnan(found["roc_auc"])
    assert 0 <= found["f1"] <= 1
