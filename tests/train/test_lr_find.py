"""The learning-rate range test."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onelaunch as ol
from tests.reference import problem
from tests.train.checkpointed import same

pytestmark = pytest.mark.usefixtures("one_thread")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_suggests_a_rate_that_learns_and_leaves_the_model_alone(engine, tmp_path):
    torch.manual_seed(1)
    x, y = problem("cross_entropy", 500)
    model = network()
    before = copy.deepcopy(model)
    found = ol.lr_find(model, x, y, engine=engine, optimizer="sgd")
    assert same(model, before)
    assert 1e-3 < found.suggestion < 10
    assert found.lrs[0] == pytest.approx(1e-7)
    assert len(found.lrs) == len(found.losses) == len(found.smoothed) <= 100
    assert all(b > a for a, b in zip(found.lrs, found.lrs[1:], strict=False))
    first = nn.functional.cross_entropy(model(x[rows := ol.permutation(500, 0, 0)[:32]]), y[rows]).item()
    assert found.losses[0] == pytest.approx(first, rel=1e-5)
    history = ol.fit(model, x, y, epochs=10, lr=found.suggestion, optimizer="sgd", engine=engine, progress=False)
    assert history.epochs[-1]["loss"] < 0.5 * history.losses[0]
    assert found.plot(tmp_path / "range.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 3}, r"steps=3 must be 10 or more"),
        ({"min_lr": 1.0, "max_lr": 0.1}, r"must be positive numbers below 1e30, the first one smaller"),
        ({"min_lr": "a"}, r"min_lr='a' is not a number"),
        ({"batchsize": 3}, r"lr_find has no argument 'batchsize'; did you mean 'batch_size'"),
        ({"epochs": 3}, r"lr_find has no argument 'epochs': pass steps=, the number of steps"),
        ({"lr": 3}, r"lr_find has no argument 'lr': pass min_lr= and max_lr="),
        ({"y": torch.randn(150, 4) * 1e30, "loss": "mse"}, r"diverges from the first steps on"),
    ],
)
def test_mistakes_get_one_line(arguments, message):
    x, y = problem("cross_entropy")
    given = {"y": y, **arguments}
    with pytest.raises(ol.OnelaunchError, match=message) as caught:
        ol.lr_find(network(), x, given.pop("y"), **given)
    assert "\n" not in str(caught.value)
