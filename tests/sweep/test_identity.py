"""A checkpoint folder continues the sweep it was made by, and refuses any other, whatever differs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.model_selection import TimeSeriesSplit
from torch import nn

import onelaunch as ol
from tests.sweep.models import make_model, rows

X, Y = (np.asarray(each) for each in rows())
WEIGHTS = np.linspace(0.5, 1.5, len(X))
FOLDS = list(TimeSeriesSplit(3).split(X))
LAST = FOLDS[0][1].max() + 1  # rows that the first member neither trains nor validates on
COMMON: dict[str, Any] = {"grid": {"lr": [0.01, 0.1]}, "epochs": 2, "progress": False, "engine": "eager"}


def huber(delta: float):
    return lambda output, y: F.huber_loss(output, F.one_hot(y.long(), 3).float(), delta=delta)


def l1(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - F.one_hot(y.long(), 3)).abs().mean()


def l2(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output - F.one_hot(y.long(), 3)).square().mean()


l2.__qualname__ = l1.__qualname__  # as if the function had been edited


class Scaled(nn.Module):
    def __init__(self, delta: float) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.delta * l1(output, y)


class Weighted:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.weight * l1(output, y)


def bound(value: Any = 1.0, by_keyword: float = 1.0):
    def loss(output: torch.Tensor, y: torch.Tensor, *, factor: float = by_keyword) -> torch.Tensor:
        weight = value["a"] if isinstance(value, dict) else float(torch.as_tensor(value).sum())
        return factor * weight * l1(output, y)

    return loss


def changed(array: np.ndarray, first: int) -> np.ndarray:
    found = array.copy()
    found[first:] = (found[first:] + 1) % 3 if array is Y else found[first:] * 2
    return found


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows of a later fold": ({"folds": FOLDS}, {"x": changed(X, LAST)}),
    "targets of a later fold": ({"folds": FOLDS}, {"y": changed(Y, LAST)}),
    "weights": ({"folds": 3, "sample_weight": WEIGHTS}, {"sample_weight": changed(WEIGHTS, 0)}),
    "rows of a later part": ({"rows": [range(30), range(30, 60)]}, {"x": changed(X, 30)}),
    "settings of a loss module": ({"loss": Scaled(1.0)}, {"loss": Scaled(2.0)}),
    "what a function is bound to": ({"loss": huber(1.0)}, {"loss": huber(2.0)}),
    "the arguments of a partial": (
        {"loss": functools.partial(F.cross_entropy, label_smoothing=0.1)},
        {"loss": functools.partial(F.cross_entropy, label_smoothing=0.2)},
    ),
    "the settings of a loss object": ({"loss": Weighted(1.0)}, {"loss": Weighted(2.0)}),
    "a keyword that a function is bound to": ({"loss": bound(by_keyword=1.0)}, {"loss": bound(by_keyword=2.0)}),
    "a tensor that a function is bound to": ({"loss": bound(torch.ones(3))}, {"loss": bound(torch.arange(3.0))}),
    "a dict that a function is bound to": ({"loss": bound({"a": 1.0})}, {"loss": bound({"a": 2.0})}),
    "a NumPy number that a function is bound to": ({"loss": bound(np.float32(1))}, {"loss": bound(np.float32(2))}),
    "bootstrap": ({"validation": (X, Y)}, {"bootstrap": True}),
    "where one part of the rows ends": (
        {"rows": [range(20), range(20, 60)], "validation": (X, Y)}, {"rows": [range(40), range(40, 60)]},
    ),
    "the code of a function": ({"loss": l1}, {"loss": l2}),
    "a loss in the grid": ({"grid": {"loss": [Scaled(1.0), Scaled(2.0)]}}, {"grid": {"loss": [Scaled(1.0), Scaled(3.0)]}}),
    "the metric of halving": (
        {"strategy": "halving", "validation": 0.3, "metric": "accuracy"}, {"metric": "loss"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_another_sweep_is_refused(name, tmp_path):
    options, change = CHANGES[name]
    given = {"make_model": make_model, "x": X, "y": Y, **COMMON, **options}
    table = ol.sweep(**given, checkpoint=tmp_path).table.to_dicts()
    again = ol.sweep(**given, checkpoint=tmp_path)
    assert again.table.to_dicts() == table
    with pytest.raises(ol.CheckpointError, match="holds another sweep"):
        ol.sweep(**{**given, **change}, checkpoint=tmp_path)


def test_the_identity_is_the_same_in_another_process(tmp_path):
    """Also of constants in sets, whose order differs from process to process."""
    import subprocess
    import sys

    program = tmp_path / "program.py"
    program.write_text(
        "import sys, numpy as np, onelaunch as ol\n"
        "from torch import nn\n"
        "def make_model(kind='a', factory=lambda width: nn.Linear(width, 8)):\n"
        "    return nn.Sequential(factory(5), nn.ReLU() if kind in {'a', 'b', 'c'} else nn.Tanh(), nn.Linear(8, 3))\n"
        "x, y = np.arange(60, dtype='f4').reshape(12, 5) / 60, np.arange(12) % 3\n"
        "ol.sweep(make_model, x, y, grid={'kind': ['a', 'd']}, epochs=1, checkpoint=sys.argv[1], progress=False)\n"
    )
    for seed in ("1", "2", "3"):
        command = [sys.executable, program, tmp_path / "folder"]
        done = subprocess.run(command, capture_output=True, text=True, env=_environment(seed), check=False)
        assert done.returncode == 0, done.stderr


def _environment(seed: str) -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONHASHSEED": seed}
