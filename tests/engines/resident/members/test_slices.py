"""Members in turns: every step of every member once and in order, and no member twice in a launch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelaunch.engines.members import MemberTask
from onelaunch.engines.resident.members.slices import launches_of, slices_per_member


def task(number: int, first: int, last: int, per_epoch: int) -> MemberTask:
    run: Any = SimpleNamespace(spec=SimpleNamespace(steps_per_epoch=per_epoch))
    return MemberTask(number, run, first, last)


@given(
    members=st.integers(1, 90), places=st.integers(1, 40), per_epoch=st.integers(1, 7), first=st.integers(0, 20),
    length=st.integers(1, 60),
)  # fmt: skip
def test_every_member_takes_all_its_steps_in_order(members, places, per_epoch, first, length):
    tasks = [task(number, first, first + length, per_epoch) for number in range(members)]
    launches = launches_of(tasks, places)
    at, ended = [first] * members, [0] * members
    for launch in launches:
        assert len({one.member for one in launch}) == len(launch)
        assert len(launches) == 1 or len(launch) <= places
        for one in launch:
            assert one.first_step == at[one.member] < one.last_step
            assert one.epochs_before == ended[one.member]
            assert one.last_step % per_epoch == 0 or one.last_step == first + length  # an epoch is not cut
            ended[one.member] += -(-one.last_step // per_epoch) - one.first_step // per_epoch
            at[one.member] = one.last_step
    assert at == [first + length] * members


@pytest.mark.parametrize(("members", "places", "epochs", "slices"), [(64, 132, 20, 1), (60, 30, 20, 1), (64, 30, 1, 1)])
def test_whole_runs_where_nothing_is_gained(members, places, epochs, slices):
    assert slices_per_member(members, places, epochs) == slices


def test_an_uneven_last_round_is_shared():
    count = slices_per_member(64, 30, 20)
    assert -(-64 * count // 30) / count < 2.3  # rounds of whole runs: 3


def test_runs_of_other_lengths_stay_whole():
    tasks = [task(0, 0, 10, 5), task(1, 0, 20, 5), task(2, 0, 10, 5)]
    assert [len(launch) for launch in launches_of(tasks, 2)] == [3]
    alike = [task(number, 0, 20, 5) for number in range(3)]
    assert [len(launch) for launch in launches_of(alike, 2, whole=True)] == [3]
    assert len(launches_of(alike, 2)) > 1
