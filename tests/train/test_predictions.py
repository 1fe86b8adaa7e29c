"""What a run keeps about its held-out rows, against counts made one by one."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from onelaunch.data.dataset import Dataset
from onelaunch.data.table_encoding import load_table
from onelaunch.train.mlp import mlp
from onelaunch.train.predictions import MAX_MISTAKES, MAX_VALUES, describe_predictions
from onelaunch.train.predictor import Predictor


def predictor(classes: tuple[str, ...] | None, encoding: object = None) -> Predictor:
    return Predictor(Path("run"), mlp([2, 2]), "cross_entropy" if classes else "mse", classes, encoding, 0.0)


def test_classes_are_counted_and_the_surest_mistakes_come_first() -> None:
    random = np.random.default_rng(0)
    outputs, y = random.normal(size=(200, 3)), random.integers(0, 3, 200)
    images = random.integers(0, 256, (200, 4, 4), np.uint8)
    found = describe_predictions(predictor(("a", "b", "c")), outputs, y, Dataset("x", "x", images, y, images, y))
    chosen = outputs.argmax(axis=1)
    assert found["rows"] == 200
    assert {(t, p): n for t, p, n in found["confusion"]} == {
        (t, p): int(((y == t) & (chosen == p)).sum()) for t in range(3) for p in range(3)
    }
    probability = torch.tensor(outputs).softmax(1).max(dim=1).values.numpy()
    surest = max(probability[chosen != y])
    assert len(found["mistakes"]) == MAX_MISTAKES
    assert found["mistakes"][0]["probability"] == pytest.approx(surest)
    assert all(mistake["true"] != mistake["predicted"] for mistake in found["mistakes"])
    assert base64.b64decode(found["mistakes"][0]["image"])[1:4] == b"PNG"
    flat = images.reshape(200, 16)
    rows = Dataset("x", "x", flat, y, flat, y)
    assert "row" in describe_predictions(predictor(("a", "b", "c")), outputs, y, rows)["mistakes"][0]
    assert describe_predictions(predictor(("a", "b", "c")), outputs, y, replace(rows, image_shape=(4, 4))) == found


def test_flat_rows_of_images_are_shown_as_images() -> None:
    rows, y = np.linspace(0, 1, 64, dtype=np.float32).reshape(4, 16), np.array([0, 1, 0, 1])
    flat = Dataset("x", "x", rows, y, rows, y, image_shape=(4, 4))
    square = Dataset("x", "x", rows, y, rows.reshape(4, 4, 4), y)
    wrong = np.eye(2)[1 - y]
    found = [describe_predictions(predictor(("a", "b")), wrong, y, one)["mistakes"] for one in (flat, square)]
    assert found[0] == found[1]
    assert "image" in found[0][0]


def test_values_are_thinned_and_the_largest_errors_come_first() -> None:
    y, error = np.linspace(0, 1, 5000), np.zeros(5000)
    error[[7, 9]] = 0.5, -2.0
    x = np.zeros((5000, 2), np.float32)
    found = describe_predictions(predictor(None), (y + error)[:, None], y, Dataset("x", "x", x, y, x, y))
    assert [(one["true"], one["predicted"]) for one in found["mistakes"][:2]] == [(y[9], y[9] - 2), (y[7], y[7] + 0.5)]
    assert len(found["values"]) == MAX_VALUES
    assert found["values"][0] == [0, 0]
    assert found["values"][-1] == [1, 1]
    several = np.zeros((5000, 2))
    assert describe_predictions(predictor(None), several, several, Dataset("x", "x", x, y, x, y))["values"] == []


def test_rows_of_a_table_are_shown_as_the_file_has_them(tmp_path) -> None:
    lines = ["size,colour,y", *(f"{i},{'red' if i % 2 else 'blue'},{i % 3}.5" for i in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    data = load_table(tmp_path / "t.csv", target=None, task="regression", categorical=(), fraction=0.25, seed=0)
    found = describe_predictions(predictor(None, data.encoding), np.zeros((10, 1)), data.test_values, data)
    for mistake in found["mistakes"]:
        size, colour, y = lines[mistake["line"] - 1].split(",")
        assert mistake["row"] == {"size": size, "colour": colour}
        assert mistake["true"] == float(y)
