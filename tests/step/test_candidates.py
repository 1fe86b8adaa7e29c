"""Two forms of a step take turns, and the faster one is kept. Steps are recorded on tapes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.step import candidates
from onelaunch.step.candidates import ALONE, TURNS, WITH_PATTERNS, Candidates
from tests.step.loops import plain_losses
from tests.step.tape import taped_step

pytestmark = pytest.mark.usefixtures("no_code", "tapes")


@pytest.fixture(autouse=True)
def patterns_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device: elsewhere no pattern pays."""
    monkeypatch.setattr(candidates, "pays", lambda match: True)


@pytest.fixture
def tuned_if_asked() -> None:
    """Here the clock decides as it does elsewhere."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(number: int, rows: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        yield torch.randn(rows, 6, generator=generator), torch.randint(3, (rows,), generator=generator)


def tuned_step(model: nn.Module, tune: bool | None = True, accumulate: int = 1) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, recordings = taped_step(model, optimizer, accumulate=accumulate, compile=True, tune=tune)
    return step, recordings


def plain_course(model: nn.Module, number: int, accumulate: int = 1) -> tuple[list[float], nn.Module]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plain_losses(model, optimizer, list(batches(number)), every=accumulate), model


@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_steps_of_both_forms_train(accumulate: int) -> None:
    model = network()
    number = 2 * accumulate * TURNS + 30
    expected, trained = plain_course(model, number, accumulate)
    step, recordings = tuned_step(model, accumulate=accumulate)
    forms, losses = set(), []
    for x, y in batches(number):
        losses.append(float(step(x, y)))
        forms.add(recordings.step.candidates.current)
    assert forms == {0, 1}
    assert step.choice
    assert not step.reason
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(model.state_dict(), trained.state_dict())
    assert {key[0] for key in recordings._recorded} == {recordings.step.candidates.current}
    assert len(recordings.step.candidates._functions) == 1


def test_the_slower_form_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for slower in (0, 1):
        step, recordings = tuned_step(network())
        found: Candidates = recordings.step.candidates

        recorded: list[Any] = []

        class Event:
            def record(self, found: Candidates = found, recorded: list[Any] = recorded) -> None:
                self.form = found.current

                self.at = len(recorded)
                recorded.append(self)

            def query(self, recorded: list[Any] = recorded) -> bool:  # the device is some steps behind
                return self.at < len(recorded) - 6

            def elapsed_time(self, end: Any, slower: int = slower) -> float:
                return 2.0 if self.form == slower else 1.0

        monkeypatch.setattr(found, "_clock", Event)
        for x, y in batches(2 * TURNS + 20):
            step(x, y)
        assert found.current == 1 - slower
        name = (WITH_PATTERNS, ALONE)[1 - slower]
        assert step.choice.startswith(name)
        assert "1 ms per step" in step.choice.replace(".00", "")


def test_without_tuning_the_first_form_stays() -> None:
    step, recordings = tuned_step(network(), tune=False)
    for x, y in batches(2 * TURNS + 20):
        step(x, y)
    assert recordings.step.candidates.current == 0
    assert step.choice == ""


def test_a_short_run_never_compiles_the_other_form(monkeypatch: pytest.MonkeyPatch) -> None:
    step, recordings = tuned_step(network(), tune=None)
    found: Candidates = recordings.step.candidates
    now = [0.0]
    monkeypatch.setattr(candidates.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(found, "has_compiled", lambda seconds: Candidates.has_compiled(found, 10.0))
    for x, y in batches(3 * TURNS):
        step(x, y)
    assert not found.takes_turns
    assert 1 not in found._functions
    now[0] = 10.0  # as long as compiling took
    for x, y in batches(3 * TURNS):
        step(x, y)
    assert step.choice


def test_a_form_that_cannot_be_compiled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    expected, trained = plain_course(model, 20)
    step, recordings = tuned_step(model)
    compiles = candidates.onelaunch

    def backend(*args: Any, patterns: Any, **options: Any) -> Any:
        if not patterns:
            raise ValueError("no such kernel")
        return compiles(*args, patterns=patterns, **options)

    monkeypatch.setattr(candidates, "onelaunch", backend)
    losses = [float(step(x, y)) for x, y in batches(20)]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(model.state_dict(), trained.state_dict())
    assert "no such kernel" in step.choice
    assert not step.reason
    assert len(recordings) == 1


def test_two_kinds_of_inputs() -> None:
    model = network()
    step, recordings = tuned_step(model)
    for (x, y), (few, targets) in zip(batches(2 * TURNS + 20), batches(2 * TURNS + 20, 3), strict=True):
        step(x, y)
        step(few, targets)
    assert step.choice
    assert {key[0] for key in recordings._recorded} == {recordings.step.candidates.current}


@pytest.mark.parametrize("tune", [1, "yes", 0.5])
def test_tune_is_checked(tune: Any) -> None:
    model = network()
    with pytest.raises(OnelaunchError, match="tune="):
        ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), tune=tune)
