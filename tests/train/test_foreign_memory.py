"""What belongs to the caller stays as it is: arrays that a model changes in place, weights that callbacks see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.output = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        x /= 2
        return self.output(x)


class OutOfPlace(InPlace):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output((x - 0.5) / 2)


def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(50, 6)).astype(np.float32), generator.integers(0, 3, 50)


def fit(model: nn.Module, x: Any, y: Any, **options: Any) -> ol.History:
    return ol.fit(model, x, y, **{"epochs": 3, "progress": False, **options})


def test_validation_rows_are_the_same_in_every_epoch() -> None:
    x, y = rows()
    held = x.copy()
    found = fit(InPlace(), x, y, validation=(held, y))
    expected = fit(OutOfPlace(), *rows(), validation=rows())
    for one, other in zip(found.epochs, expected.epochs, strict=True):
        assert one["validation"]["loss"] == pytest.approx(other["validation"]["loss"], rel=1e-5)
    assert np.array_equal(held, rows()[0])
    assert np.array_equal(x, rows()[0])


def test_prediction_leaves_the_array_alone() -> None:
    x, _ = rows()
    first, second = ol.predict(InPlace(), x), ol.predict(InPlace(), x)
    assert np.array_equal(first, second)
    assert np.array_equal(x, rows()[0])


def test_a_file_that_cannot_be_written_trains_and_predicts(tmp_path: Path) -> None:
    x, y = rows()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    starts = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3))
    for model in (InPlace(), starts):
        fit(model, mapped, y, epochs=1, validation=(mapped, y))
        assert len(ol.predict(model, mapped)) == len(x)
    assert np.array_equal(np.load(tmp_path / "x.npy"), x)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_a_callback_sees_the_weights_of_its_epoch(engine: str) -> None:
    x, y = rows()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    seen: list[float] = []

    def score(history: ol.History) -> None:
        with torch.no_grad():
            seen.append(nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y)).item())

    history = fit(model, x, y, lr=0.1, validation=(x, y), engine=engine, callbacks=[score])
    assert seen == pytest.approx([epoch["validation"]["loss"] for epoch in history.epochs], rel=1e-5)


def test_a_logger_needs_no_weights(tmp_path: Path) -> None:
    from onelaunch.train.callbacks import WithCallbacks
    from onelaunch.train.loop import Listener

    assert not WithCallbacks(Listener(), (ol.CsvLogger(tmp_path / "log.csv"),)).needs_weights
    assert WithCallbacks(Listener(), (lambda history: None,)).needs_weights


@pytest.mark.parametrize("engine", ["cpu", "eager"])
@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e37])
def test_the_scale_of_weights_does_not_matter(engine: str, scale: float) -> None:
    x, y = rows()
    weight = np.random.default_rng(1).integers(1, 4, len(x))
    losses = []
    for factor in (1.0, scale):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        losses.append(fit(model, x, y, engine=engine, sample_weight=weight * factor).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_parameters_that_overlap_are_left_to_pytorch() -> None:
    memory = torch.randn(60)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight, model[0].bias = nn.Parameter(memory[:48].view(8, 6)), nn.Parameter(memory[40:48])
    history = fit(model, *rows(), epochs=1)
    assert history.engine == "eager"
    assert "share their memory" in history.reason


def test_an_expanded_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(torch.randn(1, 6).expand(8, 6))
    with pytest.raises(ol.OnelaunchError, match=r"0.weight is an expanded tensor"):
        fit(model, *rows(), epochs=1)
