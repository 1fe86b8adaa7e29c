"""The schedules equal PyTorch's schedulers to a relative 1e-9."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.run.schedule import MIN_ONE_CYCLE_STEPS, SCHEDULES, learning_rate
from tests.reference import make_scheduler


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")  # the scheduler is stepped with no optimizer step
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(total=st.integers(1, 300), lr=st.floats(1e-6, 10))
@settings(max_examples=30)
def test_equals_torch(schedule, total, lr):
    if schedule == "one_cycle" and total < MIN_ONE_CYCLE_STEPS:
        return  # OneCycleLR divides by zero there; ours is tested below
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(optimizer, schedule, lr, total)
    for step in range(total):
        assert learning_rate(schedule, lr, step, total) == pytest.approx(
            scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15
        )
        if step + 1 < total:
            scheduler.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 3, 4])
def test_short_runs_have_a_rate_in_range(schedule, total):
    rates = [learning_rate(schedule, 0.5, step, total) for step in range(total)]
    assert all(0 <= rate <= 0.5 for rate in rates)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 3])
def test_every_step_of_a_short_run_trains(schedule, total):
    rates = [learning_rate(schedule, 0.5, step, total) for step in range(total)]
    assert rates[0] == 0.5
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] >= 0.5 / 4 - 1e-12


def test_the_shortest_one_cycle_run_has_a_warm_up():
    rates = [learning_rate("one_cycle", 0.5, step, MIN_ONE_CYCLE_STEPS) for step in range(MIN_ONE_CYCLE_STEPS)]
    assert rates[0] < rates[2] < rates[1]
    assert rates[3] == pytest.approx(0.5 / 250_000)
