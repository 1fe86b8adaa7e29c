"""Members that train together have the bits of runs of their own, whatever came before them on their thread."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.cpu import ENGINE, members
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import host
from onelaunch.engines.cpu.session import FIRST_STEPS, settings_for
from onelaunch.engines.members import MemberResult, MemberTask
from onelaunch.train.inputs import make_run

ROWS = 70


class Quiet:
    def __init__(self, stop: bool = False) -> None:
        self.stop, self.steps = stop, 0

    def report(self, steps: int) -> None:
        self.steps = steps


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def network(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "batch_norm":
        return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, 3))
    if kind == "two partitions, by rows":
        layers = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
        return nn.Sequential(nn.Linear(6, 64), nn.LayerNorm(64), nn.ReLU(), *layers, nn.Linear(64, 3))
    if kind == "two partitions":
        return nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 280), nn.ReLU(), nn.Linear(280, 3))
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 6, generator=random)
    return x, x[:, :3].argmax(1)


KINDS = ("plain", "batch_norm", "two partitions", "two partitions, by rows")
OPTIONS: list[dict[str, Any]] = [
    {"epochs": 3},
    {"steps": 7, "weight_decay": 0.01, "schedule": "cosine"},
    {"epochs": 2, "optimizer": "sgd", "momentum": 0.9, "lr": 0.1},
    {"epochs": 2, "class_weight": {0: 3.0}, "label_smoothing": 0.1},
    {"epochs": 3, "lr": 1e30, "optimizer": "sgd"},  # diverges: what it leaves behind must not reach the next member
    {"epochs": 3, "batch_size": 1000, "clip_norm": 0.5},
    {"epochs": 2, "lr": 0.02, "drop_last": True},
]


def tasks_of(*, validates: bool) -> list[MemberTask]:
    x, y = data()
    found = []
    for number in range(30):
        options = {"batch_size": 32, "seed": number, **OPTIONS[number % len(OPTIONS)]}
        if KINDS[number % len(KINDS)] == "batch_norm" and options["batch_size"] == 32:
            options["drop_last"] = True
        if KINDS[number % len(KINDS)].endswith("by rows"):
            options |= {"batch_size": ROWS, "clip_norm": None}
        model = network(KINDS[number % len(KINDS)], number)
        run = make_run(model, x, y, (x[:20], y[:20]) if validates else None, options)
        assert Plan(settings_for(run), host()).by_rows == KINDS[number % len(KINDS)].endswith("by rows")
        found.append(MemberTask(number, run, 0, run.spec.total_steps))
    return found


def alone(task: MemberTask) -> tuple[nn.Module, ol.History | None]:
    """What `fit` makes of the same run; no history where it diverges."""
    run = task.run
    model = copy.deepcopy(run.model)
    options = run.spec.to_dict()
    del options["rows"]
    options["betas"] = tuple(options["betas"])
    try:
        return model, ol.fit(model, run.x, run.y, validation=run.validation, progress=False, **options)
    except ol.DivergedError:
        return model, None


def assert_equals(task: MemberTask, result: MemberResult, model: nn.Module, history: ol.History | None) -> None:
    losses = torch.cat([segment.losses for segment in result.segments])
    if history is None:
        assert not torch.isfinite(losses).all()
        return
    assert losses.tolist() == history.losses
    assert [s.validation and s.validation.loss for s in result.segments] == [
        epoch["validation"] and epoch["validation"]["loss"] for epoch in history.epochs
    ]
    rows = [int(epoch["accuracy"] * len(task.run.y) + 0.5) for epoch in history.epochs]
    if not task.run.spec.drop_last and task.run.spec.steps is None:
        assert [segment.correct for segment in result.segments] == rows
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, task.run.model.state_dict()[name]), name


@pytest.mark.parametrize("validates", [True, False])
def test_members_have_the_bits_of_fit(validates):
    tasks = tasks_of(validates=validates)
    expected = {task.index: alone(task) for task in tasks}
    monitor = Quiet()
    results = list(ENGINE.train_members(tasks, monitor))
    assert sorted(result.index for result in results) == list(range(len(tasks)))
    for result in results:
        assert_equals(tasks[result.index], result, *expected[result.index])
    assert monitor.steps > 0


def test_a_member_in_two_tasks_has_the_bits_of_one():
    tasks = [task for task in tasks_of(validates=True) if task.run.spec.total_steps > 3 and task.run.spec.lr < 1]
    expected = {task.index: alone(task) for task in tasks}
    first = [dataclasses.replace(task, last_step=task.run.spec.steps_per_epoch) for task in tasks]
    halves = {result.index: result for result in ENGINE.train_members(first, Quiet())}
    second = [
        dataclasses.replace(task, first_step=task.run.spec.steps_per_epoch, state=halves[task.index].state)
        for task in tasks
    ]
    for result in ENGINE.train_members(second, Quiet()):
        whole = dataclasses.replace(result, segments=halves[result.index].segments + result.segments)
        assert_equals(next(t for t in tasks if t.index == result.index), whole, *expected[result.index])


def test_a_stop_returns_without_unfinished_members():
    assert list(ENGINE.train_members(tasks_of(validates=False), Quiet(stop=True))) == []


class StopsLater(Quiet):
    """Asks for a stop from the second time on that it is looked at, which is after the first native call."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    @property
    def stop(self) -> bool:
        self.looks += 1
        return self.looks > 1

    @stop.setter
    def stop(self, value: bool) -> None: ...


def test_a_stop_is_served_within_the_first_epoch(monkeypatch):
    trained = []
    train, whole = members.MemberSession._train, members.MemberSession._whole_epochs

    def noted_train(self, step, count):
        trained.append(count)
        return train(self, step, count)

    def noted_whole(self, first_step, count):
        trained.append(count * self.spec.steps_per_epoch)
        return whole(self, first_step, count)

    monkeypatch.setattr(members.MemberSession, "_train", noted_train)
    monkeypatch.setattr(members.MemberSession, "_whole_epochs", noted_whole)
    run = make_run(network("plain", 0), *data(), None, {"epochs": 3, "batch_size": 1})
    assert list(ENGINE.train_members([MemberTask(0, run, 0, run.spec.total_steps)], StopsLater())) == []
    assert trained == [FIRST_STEPS]


def test_a_long_epoch_never_runs_in_one_call(monkeypatch):
    tasks = tasks_of(validates=True)[:9]
    expected = {task.index: alone(task) for task in tasks}
    monkeypatch.setattr(members, "MAX_EPOCH_SECONDS", 0.0)
    monkeypatch.setattr(members.MemberSession, "_whole_epochs", None)
    for result in ENGINE.train_members(tasks, Quiet()):
        assert_equals(tasks[result.index], result, *expected[result.index])


def test_an_error_in_a_thread_reaches_the_caller():
    tasks = tasks_of(validates=False)[:2]
    broken = [dataclasses.replace(task, state={"exp_avg.0.weight": "not a tensor"}) for task in tasks]
    with pytest.raises(AttributeError):
        list(ENGINE.train_members(broken, Quiet()))


def test_the_plan_says_how_many_run_at_once():
    runs = [task.run for task in tasks_of(validates=False)]
    assert "2 members at once" in ENGINE.members_plan(runs)
