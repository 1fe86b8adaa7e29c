"""Validation metrics by scikit-learn's definitions, from the model's outputs. scikit-learn is imported when one is asked for.

Of two classes, `f1`, `precision`, `recall` and `average_precision` are those of class 1: of names, the second in sorted
order. With more than two, `f1`, `precision`, `recall` and `average_precision` are unweighted means over the classes
("macro"), and `roc_auc` is the mean of one class against the rest. With several values per row, value metrics are uniform
means. A metric that these rows do not define, such as `roc_auc` of rows of one class, is NaN.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from onelaunch.run.spec import Spec

Array = np.ndarray[Any, Any]


def compute_metrics(spec: Spec, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The run's metrics by name. outputs: the model's, `[rows, …]`; targets: those of the same rows, as in Run."""
    from sklearn.exceptions import UndefinedMetricWarning

    outputs = outputs.double()
    y = targets.cpu().numpy()
    if spec.loss == "mse":
        compute = _value_metrics(outputs.flatten(1).numpy(), y.reshape(len(y), -1))
    elif spec.loss == "cross_entropy":
        compute = _class_metrics(outputs.softmax(dim=1).numpy(), outputs.argmax(dim=1).numpy(), y)
    else:
        chosen = (outputs > 0).to(torch.int64).flatten(1).numpy()
        compute = _label_metrics(
            outputs.sigmoid().flatten(1).numpy(), chosen, (y > 0.5).reshape(len(y), -1).astype(int)
        )
    found = {}
    for name in spec.all_metrics:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UndefinedMetricWarning)
            warnings.filterwarnings("ignore", message="y_pred contains classes not in y_true")
            try:
                found[name] = float(compute[name]())
            except ValueError:  # scikit-learn: these rows do not define the metric
                found[name] = math.nan
    return found


def _class_metrics(probabilities: Array, chosen: Array, y: Array) -> dict[str, Callable[[], float]]:
    from sklearn import metrics

    classes = probabilities.shape[1]
    labels = np.arange(classes)
    binary = classes == 2
    average: dict[str, Any] = {"zero_division": 0.0, "average": "binary" if binary else "macro"}

    def one_against_rest(metric: Callable[..., float]) -> float:
        if binary:
            return metric(y, probabilities[:, 1])
        return float(np.mean([metric(y == label, probabilities[:, label]) for label in labels]))

    return {
        "balanced_accuracy": lambda: metrics.balanced_accuracy_score(y, chosen),
        "f1": lambda: metrics.f1_score(y, chosen, **average),
        "f1_macro": partial(metrics.f1_score, y, chosen, average="macro", zero_division=0.0),
        "f1_micro": partial(metrics.f1_score, y, chosen, average="micro", zero_division=0.0),
        "f1_weighted": partial(metrics.f1_score, y, chosen, average="weighted", zero_division=0.0),
        "precision": lambda: metrics.precision_score(y, chosen, **average),
        "recall": lambda: metrics.recall_score(y, chosen, **average),
        "roc_auc": lambda: one_against_rest(metrics.roc_auc_score),
        "average_precision": lambda: one_against_rest(metrics.average_precision_score),
        "log_loss": lambda: metrics.log_loss(y, probabilities, labels=labels),
        "matthews_corrcoef": lambda: metrics.matthews_corrcoef(y, chosen),
    }


def _label_metrics(probabilities: Array, chosen: Array, y: Array) -> dict[str, Callable[[], float]]:
    """Of bce_with_logits: of its one output, or means over its outputs, each a class of its own."""
    each = [
        _class_metrics(np.stack([1 - p, p], 1), c, t) for p, c, t in zip(probabilities.T, chosen.T, y.T, strict=True)
    ]
    return {name: partial(_mean, [compute[name] for compute in each]) for name in each[0]}


def _mean(computes: list[Callable[[], float]]) -> float:
    return float(np.mean([compute() for compute in computes]))


def _value_metrics(values: Array, y: Array) -> dict[str, Callable[[], float]]:
    from sklearn import metrics

    return {
        "r2": lambda: metrics.r2_score(y, values),
        "rmse": lambda: float(np.mean(np.sqrt(metrics.mean_squared_error(y, values, multioutput="raw_values")))),
        "mae": lambda: metrics.mean_absolute_error(y, values),
        "mse": lambda: metrics.mean_squared_error(y, values),
        "median_absolute_error": lambda: metrics.median_absolute_error(y, values),
        "explained_variance": lambda: metrics.explained_variance_score(y, values),
    }
