"""Candidates that cannot be trained are rows of the table, like those that diverge; the others have results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.sweep import trainer
from tests.sweep.models import make_model, rows, same_weights

X, Y = rows()
OPTIONS: dict[str, Any] = {"epochs": 2, "validation": 0.2, "progress": False}


def picky(width: int = 8, inputs: int = 5) -> nn.Module:
    """A model for even widths alone."""
    if width % 2:
        raise ValueError(f"width={width} is odd\nand a second line")
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 3))


@pytest.mark.parametrize(
    "grid",
    [{"width": [7, 8]}, {"width": [8, 7]}, {"width": [7, 8, 9], "lr": [0.1, 0.01]}, {"width": [9, 7, 4, 5]}],
    ids=str,
)
@pytest.mark.parametrize("strategy", ["grid", "halving"])
def test_a_model_that_cannot_be_made_is_a_failed_row(grid, strategy):
    result = ol.sweep(picky, X, Y, grid=grid, strategy=strategy, seed=3, **OPTIONS)
    assert len(result.table) == np.prod([len(values) for values in grid.values()])
    assert result.best.parameters["width"] % 2 == 0
    for row in result.table:
        odd = row.parameters["width"] % 2
        assert bool(row.failed) == bool(odd)
        if odd:
            assert row.failed == (f"make_model raised ValueError: width={row.parameters['width']} is odd",)
    assert "1 of 1 failed" in str(result.table)
    failed = next(iter(result.failures))
    assert result.histories[failed].losses == []
    with pytest.raises(ol.OnelaunchError, match="is odd"):
        result.model(failed)
    torch.manual_seed(3)
    alone = picky(result.best.parameters["width"])
    own = {name: value for name, value in result.best.parameters.items() if name != "width"}
    ol.fit(alone, X, Y, seed=3, **own, **OPTIONS)
    assert same_weights(result.best_model, alone)


def test_a_model_that_does_not_fit_the_data_is_a_failed_row(tmp_path):
    result = ol.sweep(picky, X, Y, grid={"inputs": [6, 5]}, **OPTIONS)
    assert result.best.parameters == {"inputs": 5}
    assert "has 5 values per row, the model's first Linear takes 6" in result.failures[0]
    result.html(tmp_path / "sweep.html")
    result.plot(tmp_path / "sweep.png")
    assert result.to_pandas()["failed"].tolist() == [0, 1]


def test_a_network_that_the_requested_engine_refuses_is_a_failed_row():
    def model(softly: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Softshrink() if softly else nn.ReLU(), nn.Linear(8, 3))

    result = ol.sweep(model, X, Y, grid={"softly": [True, False]}, engine="cpu", **OPTIONS)
    assert result.best.parameters == {"softly": False}
    assert "engine='cpu' cannot run this" in result.failures[0]
    with pytest.raises(ol.UnsupportedError, match="engine='cpu' cannot run this"):
        ol.sweep(model, X, Y, grid={"softly": [True], "lr": [0.1, 0.2]}, engine="cpu", **OPTIONS)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_split_that_cannot_be_trained_fails_alone(bad):
    """Here a split whose rows all have weight 0, wherever it stands."""
    weights = np.r_[np.zeros(20), np.ones(len(Y) - 20)]
    splits = [np.arange(20, 90), np.arange(20)] if bad else [np.arange(20), np.arange(20, 90)]
    options = {"sample_weight": weights, "epochs": 1, "validation": (X, Y), "progress": False}
    result = ol.sweep(make_model, X, Y, grid={"lr": [0.1, 0.01]}, rows=splits, **options)
    assert list(result.failures) == [bad, 2 + bad]
    assert "leave no training row with a weight above 0" in result.failures[bad]
    with pytest.raises(ol.OnelaunchError, match=r"^class_weight and sample_weight leave no training row"):
        ol.sweep(make_model, X, Y, grid={"lr": [0.1, 0.01]}, rows=[splits[bad]] * 2, **options)


def test_where_all_fail_the_first_candidate_is_named():
    with pytest.raises(ol.OnelaunchError) as caught:
        ol.sweep(picky, X, Y, grid={"width": [7, 9], "lr": [0.1, 0.2]}, **OPTIONS)
    assert str(caught.value) == (
        "no candidate can be trained; the first, width=7, lr=0.1, seed=0, failed: "
        "make_model raised ValueError: width=7 is odd"
    )
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ol.OnelaunchError, match=r"the first, lr=0\.1, seed=0, failed: .* AssertionError$"):
        ol.sweep(fails_without_words, X, Y, grid={"lr": [0.1]}, **OPTIONS)


def fails_without_words() -> nn.Module:
    raise AssertionError


def test_mistakes_in_the_call_are_raised_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(trainer, "_train_chunk", lambda *_: pytest.fail("trained"))
    with pytest.raises(TypeError, match=r"make_model returned None, which is not an nn\.Module"):
        ol.sweep(lambda width=1: None, X, Y, grid={"width": [1, 2]}, **OPTIONS)  # type: ignore[return-value]
    with pytest.raises(TypeError, match="missing a required argument: 'depth'"):
        ol.sweep(
            lambda width, depth: picky(width), X, Y, grid=[{"width": [2], "depth": [1]}, {"width": [2]}], **OPTIONS
        )
    bad = X.copy()
    bad[7, 2] = np.nan
    with pytest.raises(ol.OnelaunchError, match=r"^x holds NaN or Inf \(first in row 7\)"):
        ol.sweep(picky, bad, Y, grid={"width": [7, 8]}, **OPTIONS)
    with pytest.raises(ol.OnelaunchError, match=r"^y\[0\]=5 is not a class"):
        ol.sweep(picky, X, Y + 5, grid={"width": [4, 8]}, **OPTIONS)


def test_a_failed_candidate_is_tried_again_in_its_checkpoint(tmp_path):
    broken = [True]

    def model(width: int) -> nn.Module:
        if width == 4 and broken[0]:
            raise RuntimeError("no such file")
        return make_model(width)

    arguments = {"grid": {"width": [8, 4]}, "checkpoint": tmp_path / "kept", **OPTIONS}
    assert ol.sweep(model, X, Y, **arguments).failures
    broken[0] = False
    assert not ol.sweep(model, X, Y, **arguments).failures


def test_a_model_that_is_too_large_beside_others_trains_after_them(monkeypatch):
    made: list[int] = []

    def model(width: int) -> nn.Module:
        made.append(width)
        if made.count(width) == 1 and width == 16:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return make_model(width)

    result = ol.sweep(model, X, Y, grid={"width": [8, 16, 4]}, **OPTIONS)
    assert not result.failures
    assert made.count(16) == 2


class Picky(nn.Module):
    """Not an MLP, and cannot be trained on a batch of one row, which 61 rows leave in batches of 30."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x).sort(dim=1).values))


@pytest.mark.parametrize("strategy", ["grid", "halving"])
def test_a_model_that_fails_in_its_first_epoch_is_a_failed_row(strategy):
    arguments: dict[str, Any] = {"epochs": 3, "validation": (X, Y), "strategy": strategy, "progress": False}
    result = ol.sweep(Picky, X[:61], Y[:61], grid={"batch_size": [30, 32, 61]}, **arguments)
    assert result.best.parameters["batch_size"] != 30
    assert list(result.failures) == [0]
    assert "on a batch of 1 rows: Expected more than 1 value per channel" in result.failures[0]
    message = "no candidate can be trained; the first, batch_size=30, seed=0, failed: model failed at step"
    with pytest.raises(ol.OnelaunchError, match=message):
        ol.sweep(Picky, X[:61], Y[:61], grid={"batch_size": [30, 20, 15]}, **arguments)


class Failing:
    """A callback that raises `error` in members of this learning rate."""

    def __init__(self, error: BaseException, lr: float = 0.25) -> None:
        self.error, self.lr = error, lr
        self.calls: list[float] = []

    def __call__(self, history: ol.History) -> None:
        self.calls.append(history.epochs[-1]["lr"])
        if self.calls[-1] == self.lr:
            raise self.error


@pytest.mark.parametrize("strategy", ["grid", "halving"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("no\nrows"), "a callback raised ZeroDivisionError: no"),
        (MemoryError(), "a callback raised MemoryError"),
        (ol.OnelaunchError("no"), "a callback failed: no"),
    ],
    ids=repr,
)
def test_a_member_whose_callback_raises_is_a_failed_row(strategy, error, reason):
    callback = Failing(error)
    arguments: dict[str, Any] = {"grid": {"lr": [0.25, 0.125]}, "strategy": strategy, **OPTIONS}
    result = ol.sweep(picky, X, Y, callbacks=[callback], **arguments)
    assert result.failures == {0: reason}
    assert result.best.parameters == {"lr": 0.125}
    assert callback.calls == [0.25, 0.125, 0.125], "after the failure, the member trains no further"
    assert same_weights(result.model(1), ol.sweep(picky, X, Y, **arguments).model(1))


def test_where_every_callback_raises_the_reason_is_raised(tmp_path):
    (tmp_path / "log.csv").mkdir()
    with pytest.raises(
        ol.OnelaunchError, match=r"no candidate .* a callback failed: path=.*log\.csv' cannot be written"
    ):
        ol.sweep(picky, X, Y, grid={"width": [4, 8]}, callbacks=[ol.CsvLogger(tmp_path / "log.csv")], **OPTIONS)


def test_a_callback_may_interrupt_the_sweep():
    callback = Failing(KeyboardInterrupt())
    result = ol.sweep(picky, X, Y, grid={"lr": [0.125, 0.25, 0.5]}, callbacks=[callback], **OPTIONS)
    assert result.interrupted
    assert not result.failures
    assert callback.calls == [0.125, 0.125, 0.25]


def test_a_member_whose_callback_raised_is_tried_again_in_its_checkpoint(tmp_path):
    arguments = {"grid": {"lr": [0.25, 0.125]}, "checkpoint": tmp_path / "kept", **OPTIONS}
    assert ol.sweep(picky, X, Y, callbacks=[Failing(OSError("no disk"))], **arguments).failures
    again = Failing(OSError("no disk"), lr=0.0)
    assert not ol.sweep(picky, X, Y, callbacks=[again], **arguments).failures
    assert again.calls == [0.25, 0.25]


@pytest.mark.parametrize("strategy", ["grid", "halving"])
@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_a_member_that_diverges_at_once_is_kept_in_the_checkpoint(tmp_path, engine, strategy):
    """Before its first loss, so that it has none to store."""
    options: dict[str, Any] = {
        **OPTIONS,
        "optimizer": "sgd",
        "engine": engine,
        "strategy": strategy,
        "checkpoint": tmp_path,
    }
    tables = [ol.sweep(make_model, X, Y, grid={"lr": [1e-3, 1e30]}, **options).table for _ in range(2)]
    assert tables[0].to_dicts() == tables[1].to_dicts()
    assert [bool(row.failed) for row in tables[0]] == [False, True]


def test_folds_may_be_a_splitter_of_scikit_learn():
    from sklearn.model_selection import StratifiedKFold

    given = StratifiedKFold(3, shuffle=True, random_state=1)
    options = {name: value for name, value in OPTIONS.items() if name != "validation"}
    tables = [
        ol.sweep(make_model, X, Y, grid={"lr": [1e-3, 1e-2]}, folds=folds, **options).table.to_dicts()
        for folds in (given, list(given.split(X, Y)))
    ]
    assert tables[0] == tables[1]


def test_folds_that_need_groups_say_how_to_pass_them():
    from sklearn.model_selection import GroupKFold

    with pytest.raises(
        ol.OnelaunchError, match=r"folds=GroupKFold.* cannot split these rows .*: pass its pairs"
    ) as caught:
        ol.sweep(make_model, X, Y, grid={"lr": [0.1]}, folds=GroupKFold(3), epochs=1, progress=False)
    assert "\n" not in str(caught.value)


def test_a_metric_that_some_candidates_lack_is_refused():
    grid = {"metrics": [("f1",), ()], "lr": [0.1, 0.2]}
    with pytest.raises(ol.OnelaunchError, match=r"metric='f1' is not among grid\['metrics'\] \(\): add it there"):
        ol.sweep(make_model, X, Y, grid=grid, metric="f1", **OPTIONS)


def test_a_metric_without_a_value_is_no_failure(tmp_path):
    held = (X[:4], np.zeros(4, np.int64))  # of one class
    options = {**OPTIONS, "validation": held, "metric": "roc_auc"}
    result = ol.sweep(make_model, X, Y, grid={"lr": [0.1, 0.2]}, **options)
    assert not result.failures
    assert "undefined" in str(result.table)
    assert "failed" not in str(result.table)
    with pytest.raises(ol.OnelaunchError, match="metric='roc_auc' is undefined on the validation rows"):
        _ = result.best
    result.html(tmp_path / "sweep.html")


@pytest.mark.parametrize("seeds", [[[1], [2]], ["a"], [1.5]])
def test_seeds_that_are_no_integers(seeds):
    with pytest.raises(ol.OnelaunchError, match=r"seed=.* is not an integer"):
        ol.sweep(make_model, X, Y, grid={"seed": seeds}, **OPTIONS)
