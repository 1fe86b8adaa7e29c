"""The limit of --quick: work is cut off in time, even if it swallows exceptions, and nothing is measured too late."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from contextlib import suppress

import pytest

from onelaunch.bench.case import REGISTRY, Trial, case
from onelaunch.bench.ceilings import Ceilings
from onelaunch.bench.measure import measure
from onelaunch.bench.run import run_case, run_cases
from onelaunch.bench.time_limit import MIN_CASE_SECONDS, OUT_OF_TIME, OutOfTimeError, TimeLimit


def nothing() -> None:
    pass


def test_each_case_gets_an_equal_part_of_what_is_left():
    limit = TimeLimit(60)
    assert limit.part(3).left() == pytest.approx(20, abs=0.1)
    assert limit.part(100).left() == pytest.approx(MIN_CASE_SECONDS, abs=0.1)
    assert TimeLimit(2).part(100).left() == pytest.approx(2, abs=0.1)
    assert limit.part(3).whole is limit
    assert TimeLimit().left() == TimeLimit().part(5).left() == math.inf


def test_work_is_cut_off_even_if_it_swallows_the_exception():
    before, begin = signal.getsignal(signal.SIGALRM), time.monotonic()
    with pytest.raises(OutOfTimeError), TimeLimit(0.05).cut():
        time.sleep(30)
    with pytest.raises(OutOfTimeError), TimeLimit(60).cut(0.05), suppress(OutOfTimeError):
        time.sleep(30)
    with pytest.raises(OutOfTimeError), TimeLimit(0).cut():
        pytest.fail("started without time")
    assert time.monotonic() - begin < 10
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_thread_without_alarms_ends_too_late_but_is_refused():
    caught: list[str] = []

    def work() -> None:
        try:
            with TimeLimit(0.01).cut():
                time.sleep(0.05)
        except OutOfTimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == [OUT_OF_TIME]


def test_a_peer_that_is_not_ready_in_time_is_absent_and_not_tried_again(monkeypatch):
    monkeypatch.setattr("onelaunch.bench.time_limit.MIN_CASE_SECONDS", 0.05)
    calls = itertools.count()

    def compiles() -> None:
        next(calls)
        try:
            time.sleep(30)
        except OutOfTimeError as error:
            raise RuntimeError("the compiler failed") from error

    whole, options = TimeLimit(20), {"units": 1, "cuda": False, "seconds": 0.01, "repeats": 3}
    works = {"onelaunch": nothing, "compiled": compiles, "eager": nothing}
    for _ in range(2):
        times, failed = measure(works, limit=TimeLimit(0.0, whole), **options)
        assert set(times) == {"onelaunch", "eager"}
        assert failed == {"compiled": OUT_OF_TIME}
    assert next(calls) == 1


def test_a_peer_whose_samples_take_too_long_is_left_out_of_later_cases_too(monkeypatch):
    monkeypatch.setattr("onelaunch.bench.time_limit.MIN_CASE_SECONDS", 0.05)
    whole, calls = TimeLimit(20), itertools.count()

    def slow() -> float:
        next(calls)
        time.sleep(30)
        return 30.0

    works = {"onelaunch": lambda: 0.1, "slow": slow, "peer": lambda: 0.1}
    for _ in range(2):
        times, failed = measure(
            works, units=1, cuda=False, seconds=60, repeats=3, self_timed=True, warm_ups=0, limit=TimeLimit(0.0, whole)
        )
        assert (set(times), failed) == ({"onelaunch", "peer"}, {"slow": OUT_OF_TIME})
    assert next(calls) == 1


def test_sampling_ends_with_the_time(monkeypatch):
    works = {"onelaunch": lambda: 0.1, "peer": lambda: 0.1}
    times, _ = measure(
        works, units=1, cuda=False, seconds=60, repeats=100, self_timed=True, limit=TimeLimit(0.0, TimeLimit(20))
    )
    assert {timing.n for timing in times.values()} == {3}


@pytest.mark.usefixtures("temporary_cases")
@pytest.mark.parametrize("slow", ["setup", "check", "ours"])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_a_case_without_time_is_left_out(slow, limit, monkeypatch):
    monkeypatch.setattr("onelaunch.bench.run.QUICK_SECONDS", 1.5 if limit is None else 60.0)

    def sleeps() -> None:
        time.sleep(30)

    def setup() -> Trial:
        if slow == "setup":
            sleeps()
        return Trial(ours=sleeps if slow == "ours" else nothing, check=sleeps if slow == "check" else nothing)

    case("train/slow", "train", "a test")(setup)
    case("memory/quick", "memory", "a test")(lambda: Trial(ours=nothing, check=nothing))
    said: list[str] = []
    begin = time.monotonic()
    results = run_cases(
        [REGISTRY["train/slow"], REGISTRY["memory/quick"]], quick=True, show=lambda result: None, announce=said.append,
        limit=limit,
    )  # fmt: skip
    assert time.monotonic() - begin < 20  # the slow case was cut off
    assert results["finished"]
    if limit is None:
        assert results["left_out"] == ["train/slow"]
        assert [one["name"] for one in results["cases"]] == ["memory/quick"]  # a group with time of its own
        assert said[1].startswith("2 of 2: memory/quick, ")
        assert said[1].endswith(" s left for memory")
    else:
        assert results["left_out"] == ["train/slow", "memory/quick"]
        assert all(words.endswith(" s left") for words in said)


@pytest.mark.usefixtures("temporary_cases")
def test_a_limit_is_divided_among_the_cases_of_all_groups(monkeypatch):
    given: list[float] = []

    def record(one, *, limit, **_options):
        given.append(limit.left())
        return {"name": one.name, "check": "passed", "times": {}}

    monkeypatch.setattr("onelaunch.bench.run.run_case", record)
    groups = ("train", "memory", "cpu")
    for group in groups:
        case(f"{group}/test", group, "a test")(lambda: Trial(ours=nothing, check=nothing))
    run_cases([REGISTRY[f"{group}/test"] for group in groups], quick=True, show=lambda result: None, limit=3000)
    assert given == pytest.approx([1000, 1500, 3000], abs=100)


@pytest.mark.usefixtures("temporary_cases")
def test_without_quick_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(
        "onelaunch.bench.run.measure", lambda works, **options: measure(works, **options | {"repeats": 2})
    )
    case("train/test", "train", "a test")(lambda: Trial(ours=nothing, check=nothing))
    said: list[str] = []
    run_cases([REGISTRY["train/test"]], quick=False, show=lambda result: None, announce=said.append)
    assert said == ["1 of 1: train/test"]
    assert run_case(REGISTRY["train/test"], quick=False, ceilings=Ceilings())["check"] == "passed"
