"""Every member of a sweep is the run that `fit` makes alone, to the same bits; failures and stops keep the rest."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import onelaunch as ol
from onelaunch.sweep import trainer
from onelaunch.sweep.active import Outcome
from onelaunch.sweep.driver import Driver
from onelaunch.sweep.splits import bootstrap_rows, k_folds
from tests.sweep.models import make_model, rows, same_weights

X, Y = rows()
VALIDATION = rows(40)
QUIET: dict[str, Any] = {"progress": False}
MODEL_NAMES = ("width", "dropout", "norm")


def alone(
    result: ol.Sweep, index: int, train: Any, validation: Any, **options: Any
) -> tuple[nn.Module, ol.History | None]:
    """What `fit` makes of a member."""
    member = result.members[index]
    torch.manual_seed(member.seed)
    model = make_model(**{name: value for name, value in member.parameters.items() if name in MODEL_NAMES})
    own = {name: value for name, value in member.parameters.items() if name not in MODEL_NAMES}
    try:
        return model, ol.fit(
            model, train[0], train[1], validation=validation, seed=member.seed, **options, **own, **QUIET
        )
    except ol.DivergedError:
        return model, None


def without_times(history: ol.History) -> list[dict[str, Any]]:
    return [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in history.epochs]


def assert_same(result: ol.Sweep, index: int, model: nn.Module, history: ol.History | None) -> None:
    if history is None:
        assert result.records[index].error
        return
    found = result.histories[index]
    assert found.losses == history.losses
    assert repr(without_times(found)) == repr(without_times(history))  # in which NaN equals NaN
    assert (found.engine, found.best_epoch) == (history.engine, history.best_epoch)
    assert same_weights(result.model(index), model)


GRIDS = st.fixed_dictionaries(
    {"lr": st.lists(st.sampled_from([1e-3, 1e-2, 0.3, 1e30]), min_size=1, max_size=2, unique=True)},
    optional={
        "width": st.just([4, 40]),
        "dropout": st.just([0.0, 0.3]),
        "norm": st.just([True]),
        "weight_decay": st.just([0, 0.01]),
        "optimizer": st.sampled_from([["sgd"], ["sgd", "adamw"]]),
        "batch_size": st.sampled_from([[16], [16, 50]]),
        "label_smoothing": st.just([0.1]),
        "schedule": st.sampled_from([["cosine"], ["constant", "one_cycle"]]),
        "class_weight": st.just([None, "balanced"]),
        "epochs": st.just([1, 3]),
        "seed": st.just([0, 7]),
    },
)


@given(grid=GRIDS, split=st.sampled_from(["pair", "folds", "fraction", "bootstrap", "none"]))
@settings(max_examples=10)
def test_every_member_has_the_bits_of_fit(grid, split):
    options: dict[str, Any] = {} if "epochs" in grid else {"epochs": 2}
    options |= {"drop_last": "norm" in grid}
    arguments: dict[str, Any] = {
        "pair": {"validation": VALIDATION}, "folds": {"folds": 3}, "fraction": {"validation": 0.25},
        "bootstrap": {"bootstrap": True, "validation": VALIDATION}, "none": {},
    }[split]  # fmt: skip
    result = ol.sweep(make_model, X, Y, grid=grid, **arguments, **options, **QUIET)
    assert len(result.records) == len(result.members)
    for member in result.members[:: max(1, len(result.members) // 12)]:
        train, validation = (X, Y), arguments.get("validation")
        if split == "folds":
            fold = k_folds(len(X), 3, torch.from_numpy(Y))[member.split]
            train, validation = (X[fold.train], Y[fold.train]), (X[fold.held], Y[fold.held])
        if split == "bootstrap":
            chosen = bootstrap_rows(len(X), member.seed, 0)
            train = (X[chosen], Y[chosen])
        assert_same(result, member.index, *alone(result, member.index, train, validation, **options))


@pytest.mark.parametrize("option", [
    {"early_stopping": 2}, {"metrics": ("f1_macro",)}, {"clip_norm": 0.1}, {"steps": 11, "epochs": None},
    {"callbacks": [lambda history: None]}, {"engine": "eager"}, {"sample_weight": np.linspace(0, 2, len(X))},
])  # fmt: skip
def test_options_of_fit_have_the_same_effect(option):
    options = {"epochs": 6, **option}
    result = ol.sweep(make_model, X, Y, grid={"lr": [0.01, 0.1]}, validation=VALIDATION, **options, **QUIET)
    for index in range(2):
        assert_same(result, index, *alone(result, index, (X, Y), VALIDATION, **options))


def test_class_names_and_their_weights():
    names = np.array(["low", "mid", "top"])
    labels, validation = names[Y], (VALIDATION[0], names[VALIDATION[1]])
    weight = {"top": 4.0}
    result = ol.sweep(
        make_model, X, labels, grid={"class_weight": [None, weight]}, epochs=2, validation=validation, **QUIET
    )
    torch.manual_seed(0)
    model = make_model()
    ol.fit(model, X, labels, epochs=2, validation=validation, class_weight=weight, **QUIET)
    assert same_weights(result.model(1), model)
    assert set(ol.predict(result.model(1), X)) <= set(names)


def test_the_order_of_the_grid_and_the_number_of_threads_do_not_matter():
    grid: dict[str, list[Any]] = {"lr": [1e-3, 1e-2], "width": [4, 8], "seed": [1, 2]}
    backwards = {name: values[::-1] for name, values in reversed(grid.items())}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ol.sweep(make_model, X, Y, grid=grid, folds=2, epochs=2, **QUIET)
        torch.set_num_threads(2)
        two = ol.sweep(make_model, X, Y, grid=backwards, folds=2, epochs=2, **QUIET)
    finally:
        torch.set_num_threads(before)
    losses = [
        {(tuple(sorted(m.parameters.items())), m.seed, m.split): r.histories[m.index].losses for m in r.members}
        for r in (one, two)
    ]
    assert losses[0] == losses[1]
    assert {tuple(sorted(row.parameters.items())): row.mean for row in one.table} == {
        tuple(sorted(row.parameters.items())): row.mean for row in two.table
    }


def test_a_diverging_member_is_reported_and_does_not_stop_the_others():
    result = ol.sweep(make_model, X, Y, grid={"lr": [1e30, 1e-2], "optimizer": ["sgd"]}, folds=2, epochs=2, **QUIET)
    assert list(result.failures) == [0, 1]
    assert "smaller lr" in result.failures[0]
    with pytest.raises(ol.OnelaunchError, match=r"member 0 \(lr=1e\+30, .*\) failed: ") as caught:
        result.model(0)
    assert str(caught.value).endswith(result.failures[0])
    assert result.best.parameters["lr"] == 1e-2
    assert "failed" in str(result.table)
    nothing = ol.sweep(make_model, X, Y, grid={"lr": [1e30], "optimizer": ["sgd"]}, folds=2, epochs=2, **QUIET)
    with pytest.raises(ol.OnelaunchError, match="no member of the sweep has a result"):
        _ = nothing.best


def test_halving_gives_the_survivors_the_bits_of_a_whole_run():
    grid = {"lr": [1e-4, 1e-3, 1e-2, 0.1, 0.3, 1e30], "width": [4, 8], "optimizer": ["sgd"]}
    result = ol.sweep(make_model, X, Y, grid=grid, strategy="halving", epochs=9, validation=VALIDATION, **QUIET)
    complete = [row for row in result.table if row.complete and not row.failed]
    assert 1 <= len(complete) < 6
    assert {row.part for row in result.table if not row.complete} <= {3, 9}  # epochs 1 and 3, of 3 steps each
    assert result.table.rows[0] in complete
    for index in complete[0].members:
        assert_same(result, index, *alone(result, index, (X, Y), VALIDATION, epochs=9))
    again = ol.sweep(
        make_model, X, Y, grid=grid, strategy="halving", epochs=9, validation=VALIDATION, engine="eager", **QUIET
    )
    assert [row.part for row in again.table] == [row.part for row in result.table]


def test_random_candidates_repeat_with_the_seed():
    class Uniform:
        def rvs(self, random_state: np.random.RandomState) -> float:
            return random_state.uniform(1e-3, 1e-2)

    def draw(seed: int) -> list[dict[str, Any]]:
        grid = {"lr": Uniform(), "width": [4, 8]}
        result = ol.sweep(make_model, X, Y, grid=grid, strategy="random", n=4, epochs=1, seed=seed, **QUIET)
        return [member.parameters for member in result.members]

    assert draw(1) == draw(1) != draw(2)
    listed = ol.sweep(
        make_model, X, Y, grid={"lr": [1, 2, 3], "width": [4, 8]}, strategy="random", n=4, epochs=1, **QUIET
    )
    assert len({str(member) for member in listed.members}) == 4


def test_ctrl_c_keeps_what_is_finished(monkeypatch):
    add = Driver._add

    def add_and_interrupt(self: Driver, outcome: Outcome) -> None:
        add(self, outcome)
        if len(self.records) == 300:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Driver, "_add", add_and_interrupt)
    result = ol.sweep(make_model, X, Y, grid={"seed": range(2000)}, epochs=1, **QUIET)
    assert result.interrupted
    assert 300 <= len(result.records) < 2000
    assert f"{len(result.records)} of 2,000 members finished" in str(result.table)
    with pytest.raises(ol.OnelaunchError, match="has not finished"):
        _ = result.histories[1999]
    losses = [history.losses for history in result.histories]
    assert len(losses) == 2000
    assert [index for index, each in enumerate(losses) if each] == sorted(result.records)
    assert result.histories[1998:][1].losses == []


def test_ctrl_c_while_models_are_made():
    made = []

    def slow_model(width: int = 8) -> nn.Module:
        made.append(width)
        if len(made) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return make_model(width)

    with pytest.raises(KeyboardInterrupt):
        ol.sweep(slow_model, X, Y, grid={"seed": range(100)}, epochs=1, **QUIET)
    assert len(made) < 8


def test_out_of_memory_means_fewer_members_at_once(monkeypatch, caplog):
    from onelaunch.engines.cpu import ENGINE

    whole = ENGINE.train_members

    def limited(tasks, monitor):
        if len(tasks) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")
        yield from whole(tasks, monitor)

    expected = ol.sweep(make_model, X, Y, grid={"seed": range(10)}, epochs=1, **QUIET)
    monkeypatch.setattr(ENGINE, "train_members", limited, raising=False)
    with caplog.at_level(logging.WARNING):
        result = ol.sweep(make_model, X, Y, grid={"seed": range(10)}, epochs=1, **QUIET)
    assert "2 members at once" in caplog.text
    assert [result.histories[i].losses for i in range(10)] == [expected.histories[i].losses for i in range(10)]


def test_many_members_need_little_memory(monkeypatch):
    """Models exist for one chunk at a time; records are a few hundred bytes."""
    alive = 0
    most = 0

    class Counted(nn.Linear):
        def __init__(self) -> None:
            nonlocal alive, most
            super().__init__(5, 3)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(trainer, "CPU_CHUNK", 50)
    result = ol.sweep(lambda: nn.Sequential(Counted()), X, Y, grid={"seed": range(400)}, epochs=1, **QUIET)
    assert len(result.records) == 400
    assert most < 120


def test_the_generator_of_the_user_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    ol.sweep(make_model, X, Y, grid={"seed": [1, 2]}, epochs=1, **QUIET)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("strategy", ["grid", "halving"])
def test_chunks_through_joblib_have_the_same_bits(strategy):
    joblib = pytest.importorskip("joblib")
    arguments: dict[str, Any] = {"grid": {"lr": [1e-3, 1e-2, 0.1], "seed": [0, 1]}, "folds": 2, "epochs": 3}
    arguments |= {"strategy": strategy, **QUIET}
    here = ol.sweep(make_model, X, Y, **arguments)
    with joblib.parallel_config("loky"):
        there = ol.sweep(make_model, X, Y, **arguments, n_jobs=2)
    assert str(there.table) == str(here.table)
    assert [record.losses.tolist() for _, record in sorted(there.records.items())] == [
        record.losses.tolist() for _, record in sorted(here.records.items())
    ]
    assert same_weights(there.best_model, here.best_model)


def test_a_module_and_its_copies():
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = ol.sweep(model, X, Y, grid={"lr": [1e-3, 1e-2]}, epochs=1, **QUIET)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not same_weights(result.model(0), result.model(1))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"grid": {"lrr": [1]}}, "grid['lrr'] is not known: pass an option of fit or one of make_model's (width, dropout, norm); "
     "did you mean 'lr'?"),
    ({"grid": {"learning_rate": [1]}}, "grid['learning_rate'] is not known: here it is lr="),
    ({"grid": {"optimizer": ["adm"]}}, "optimizer='adm' is not known"),
    ({"grid": {"optimizer": "adam"}}, "grid['optimizer']='adam' is not a list: pass ['adam']"),
    ({"grid": {"lr": [-1.0]}}, "lr=-1.0 must be a finite number"),
    ({"grid": {"lr": []}}, "grid['lr'] is empty"),
    ({"grid": {"betas": (0.9, 0.99)}}, "needs a list of pairs"),
    ({"grid": 5}, "grid=5 is not a dict of lists"),
    ({"strategy": "gird"}, "strategy='gird' is not known"),
    ({"strategy": "random"}, "strategy='random' needs n="),
    ({"n": 3}, "n=3 is for strategy='random' or 'halving'"),
    ({"strategy": "halving"}, "strategy='halving' compares candidates on validation rows"),
    ({"folds": 1}, "folds=1 must be from 2"),
    ({"folds": 3, "validation": 0.2}, "folds and validation both say"),
    ({"rows": [[0, 1000]]}, "rows[0] has row 1000: x has the rows 0 to 89"),
    ({"lr": 0.1, "grid": {"lr": [1]}}, "lr=0.1 and grid['lr'] both give it values"),
    ({"seed": 1, "grid": {"seed": [1]}}, "seed=1 and grid['seed'] both say"),
    ({"grid": {"seed": [1, 1]}}, "repeats a seed"),
    ({"cv": 3}, "sweep has no argument 'cv': here it is folds="),
    ({"epoch": 3}, "sweep has no argument 'epoch'; did you mean 'epochs'?"),
    ({"metric": "auc", "validation": 0.2}, "metric='auc' is not known"),
    ({"folds": []}, "folds=[] leaves nothing to train: pass a number of folds"),
    ({"checkpoint": 3}, "checkpoint=3 is not a path"),
    ({"loss": lambda output, y: output.mean(), "metric": "accuracy", "validation": 0.2},
     "metric='accuracy' has no meaning for a loss function of your own: pass metric='loss'"),
])  # fmt: skip
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(ol.OnelaunchError) as caught:
        ol.sweep(make_model, X, Y, **{"grid": {"lr": [1e-3]}, "epochs": 1, **QUIET, **arguments})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_engine_that_refuses_members_together_trains_them_one_by_one(monkeypatch):
    from onelaunch.engines.cpu import ENGINE

    def refuse(tasks, monitor):
        raise ol.UnsupportedError("no room for two")

    expected = ol.sweep(make_model, X, Y, grid={"dropout": [0.0, 0.2]}, epochs=1, **QUIET)
    monkeypatch.setattr(ENGINE, "train_members", refuse, raising=False)
    result = ol.sweep(make_model, X, Y, grid={"dropout": [0.0, 0.2]}, epochs=1, **QUIET)
    assert "cpu: one member after another" in result.plan
    assert [history.losses for history in result.histories] == [history.losses for history in expected.histories]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.cat([a, b], dim=1))


def test_other_inputs_and_losses_of_fit():
    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=30, shuffle=True)
    grid = {"lr": [1e-3, 1e-2]}
    by_loader = ol.sweep(make_model, loader, grid=grid, epochs=1, validation=VALIDATION, **QUIET)
    torch.manual_seed(0)
    model = make_model()
    ol.fit(model, loader, epochs=1, lr=1e-2, validation=VALIDATION, **QUIET)
    assert same_weights(by_loader.model(1), model)
    two = ol.sweep(TwoInputs, (X[:, :2], X[:, 2:]), Y, grid=grid, folds=2, epochs=1, **QUIET)
    assert two.best.mean > 0
    options: dict[str, Any] = {"grid": grid, "epochs": 1, "validation": VALIDATION, **QUIET}
    own = ol.sweep(make_model, X, Y, loss=lambda output, y: nn.functional.cross_entropy(output, y), **options)
    plain = ol.sweep(make_model, X, Y, engine="eager", **options)
    assert own.histories[1].losses == pytest.approx(plain.histories[1].losses, rel=1e-5)
    assert own.metric == "loss"
    with pytest.raises(ol.OnelaunchError, match="cannot choose rows of a DataLoader"):
        ol.sweep(make_model, loader, grid=grid, epochs=1, folds=2, **QUIET)


def test_regression_and_given_rows():
    y = X.sum(axis=1, keepdims=True)
    result = ol.sweep(
        lambda: nn.Linear(5, 1), X, y, grid={"lr": [1e-2, 1e-1]}, rows=[range(45), range(45, 90)], epochs=3,
        loss="mse", validation=(X[:9], y[:9]), metrics=("r2",), metric="r2", **QUIET,
    )  # fmt: skip
    assert [len(row.members) for row in result.table] == [2, 2]
    assert result.best.parameters == {"lr": 1e-1}
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    ol.fit(model, X[45:], y[45:], epochs=3, loss="mse", lr=1e-1, **QUIET)
    assert same_weights(result.model(3), model)


def test_folds_of_a_generator_are_those_of_a_list():
    pairs = [(np.arange(0, 60), np.arange(60, 90)), (np.arange(30, 90), np.arange(0, 30))]
    arguments: dict[str, Any] = {"grid": {"lr": [0.1]}, "epochs": 1, **QUIET}
    from_generator = ol.sweep(make_model, X, Y, folds=(pair for pair in pairs), **arguments)
    assert str(from_generator.table) == str(ol.sweep(make_model, X, Y, folds=pairs, **arguments).table)


def test_the_default_metric_follows_the_losses_of_all_candidates():
    values = X[:, :3]
    result = ol.sweep(make_model, X, values, grid={"loss": ["mse"]}, epochs=1, validation=0.2, **QUIET)
    assert (result.metric, result.failures) == ("loss", {})
    assert np.isfinite(result.best.mean)
    named = ol.sweep(
        make_model, X, Y, grid={"lr": [0.1]}, loss=nn.CrossEntropyLoss(), epochs=1, validation=0.2, **QUIET
    )
    assert named.metric == "accuracy"
    with pytest.raises(ol.OnelaunchError, match="metric='accuracy' has no meaning for loss='mse': pass metric='loss'"):
        ol.sweep(make_model, X, values, grid={"loss": ["mse"]}, metric="accuracy", epochs=1, validation=0.2, **QUIET)
