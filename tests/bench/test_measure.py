from __future__ import annotations

import time

import pytest

from onelaunch.bench.measure import measure, summarise


def test_summary_of_known_samples():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.median, timing.minimum, timing.n) == (3.0, 1.0, 5)
    assert timing.quartiles == (2.0, 4.0)
    assert timing.spread == pytest.approx(abs(1.5 - 4.0) / 3.0)


def test_times_are_per_unit_and_failures_are_kept_apart():
    def fails() -> None:
        raise OSError("gone")

    work = {"sleep": lambda: time.sleep(0.01), "fails": fails}
    times, failed = measure(work, units=10, cuda=False, seconds=0.1, repeats=5)
    assert times["sleep"].minimum == pytest.approx(0.001, rel=0.5)
    assert failed == {"fails": "OSError: gone"}


def test_a_contender_may_time_itself():
    work = {"ours": lambda: 0.002, "peer": lambda: 0.004}
    times, failed = measure(work, units=10, cuda=False, seconds=0.1, repeats=5, self_timed=True)
    assert {name: (timing.median, timing.n) for name, timing in times.items()} == {
        "ours": (0.002, 5),
        "peer": (0.004, 5),
    }
    assert not failed
