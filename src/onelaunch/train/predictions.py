"""How a trained network predicts the held-out rows: counts by class, or true and predicted values, and the worst mistakes.

A run keeps this in predictions.json, for its page. It has the keys

rows        number of held-out rows
classes     names of the classes, or None for a regression
confusion   of a classification: [true class, predicted class, rows] with class numbers, for all pairs that occur
values      of a regression: [true value, predicted value] of at most MAX_VALUES rows
mistakes    the worst first: `true` and `predicted`; `probability` given to the wrong class; `image`, a PNG in base64, or
            `row`, the columns by name; `line`, where the row stands in its file
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from onelaunch.data.dataset import Dataset
from onelaunch.data.png import as_image, encode_png
from onelaunch.data.table_file import Table
from onelaunch.train.predictor import Predictor

MAX_VALUES = 600
MAX_MISTAKES = 18
MAX_COLUMNS = 12  # of a row that is shown
MAX_PIXELS = 96  # per side of an image


def describe_predictions(predictor: Predictor, outputs: np.ndarray, y: np.ndarray, dataset: Dataset) -> dict[str, Any]:
    """The content of predictions.json. outputs: those of the held-out rows; y: their class numbers or values."""
    if predictor.classes is None:
        return _values(predictor.values_of(outputs), y, dataset)
    return _classes(predictor, outputs, y, dataset)


def _classes(predictor: Predictor, outputs: np.ndarray, y: np.ndarray, dataset: Dataset) -> dict[str, Any]:
    assert predictor.classes is not None
    chosen = outputs.argmax(axis=1)
    pairs, counts = np.unique(np.stack([y, chosen], axis=1), axis=0, return_counts=True)
    probability = predictor.probabilities_of(outputs).max(axis=1)
    wrong = np.flatnonzero(chosen != y)
    worst = wrong[np.argsort(-probability[wrong], kind="stable")][:MAX_MISTAKES]
    mistakes = [
        {"true": predictor.classes[y[row]], "predicted": predictor.classes[chosen[row]],
         "probability": float(probability[row]), **_shown(dataset, row)}
        for row in worst.tolist()
    ]  # fmt: skip
    confusion = np.concatenate([pairs, counts[:, None]], axis=1).tolist()
    return {"rows": len(y), "classes": list(predictor.classes), "confusion": confusion, "mistakes": mistakes}


def _values(predicted: np.ndarray, y: np.ndarray, dataset: Dataset) -> dict[str, Any]:
    """Several targets per row are not compared one by one: such a run has its scores alone."""
    content: dict[str, Any] = {"rows": len(y), "classes": None, "values": [], "mistakes": []}
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if predicted.ndim > 1 or y.ndim > 1:
        return content
    worst = np.argsort(-np.abs(predicted - y), kind="stable")[:MAX_MISTAKES]
    content["mistakes"] = [
        {"true": float(y[row]), "predicted": float(predicted[row]), **_shown(dataset, row)} for row in worst.tolist()
    ]
    kept = np.unique(np.linspace(0, len(y) - 1, min(len(y), MAX_VALUES)).round().astype(int))
    content["values"] = np.stack([y, predicted], axis=1)[kept].tolist()
    return content


def _shown(dataset: Dataset, row: int) -> dict[str, Any]:
    """A held-out row for a reader: an image, the columns of a table, or the first values of an array."""
    if dataset.test_table is not None:
        return {"line": int(dataset.test_table.lines[row]), "row": _columns(dataset.test_table, row, dataset)}
    assert dataset.test_x is not None
    values = dataset.test_x[row]
    values = values if dataset.image_shape is None else values.reshape(dataset.image_shape)
    if (image := as_image(values)) is not None:
        step = -(-max(image.shape[:2]) // MAX_PIXELS)
        return {"image": base64.b64encode(encode_png(image[::step, ::step])).decode()}
    return {"row": {str(number): f"{value:.4g}" for number, value in enumerate(values.ravel()[:MAX_COLUMNS].tolist())}}


def _columns(table: Table, row: int, dataset: Dataset) -> dict[str, str]:
    names = [name for name in table.names if name in dataset.encoding.encoder.columns][:MAX_COLUMNS]
    values = [table.column(name)[row] for name in names]
    texts = [value if isinstance(value, str) else "" if np.isnan(value) else f"{value:.6g}" for value in values]
    return dict(zip(names, texts, strict=True))
