from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from onelaunch.bench.cases import ops
from onelaunch.bench.measure import WARM_UPS, Timing, measure, one_line_reason, summarise


def test_summarise_known_samples():
    timing = summarise([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (timing.median, timing.minimum, timing.n) == (3.0, 1.0, 5)
    assert timing.quartiles == (2.0, 4.0)
    assert timing.spread == pytest.approx((5 - 1) / 3.0)  # the whole range of few samples
    assert summarise([1.0, 1.1, 0.9, 1.0, 50.0, 1.0]).spread == pytest.approx(0.2)  # without the farthest
    many = summarise([1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 3.0, 9.0])
    assert many.spread == pytest.approx((3.0 - 1.0) / 3.0)
    drifting = summarise([*[1.0] * 8, *[1.5] * 9])
    assert drifting.spread == pytest.approx(0.5 / 1.5)


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8, 12, 20])
@pytest.mark.parametrize("noise", ["even", "skewed", "interrupted"])
def test_another_run_is_within_the_stated_spread(n, noise):
    random = np.random.default_rng(n)

    def run() -> Timing:
        samples = {
            "even": np.exp(random.normal(0, 0.05, n)),
            "skewed": 1 + random.exponential(0.05, n),
            "interrupted": 1 + abs(random.normal(0, 0.01, n)) + (random.random(n) < 0.15) * random.random(n) / 2,
        }[noise]
        return summarise(samples.tolist())

    exceeded = 0
    for _ in range(300):
        a, b = run(), run()
        exceeded += max(a.median, b.median) / min(a.median, b.median) > (1 + a.spread) * (1 + b.spread)
    assert exceeded <= 3


def test_short_work_is_repeated_until_a_sample_is_long_enough(monkeypatch, clock):
    monkeypatch.setattr("onelaunch.bench.measure.SAMPLE_SECONDS", 0.02)
    calls = {"short": 0, "long": 0}

    def work(name: str, seconds: float) -> None:
        calls[name] += 1
        clock.sleep(seconds)

    contenders = {"short": lambda: work("short", 0.001), "long": lambda: work("long", 0.03)}
    times, _ = measure(contenders, units=10, cuda=False, seconds=0.0, repeats=5)
    assert calls["long"] == WARM_UPS + 1 + times["long"].n
    assert calls["short"] >= 5 * times["short"].n
    assert times["short"].median == pytest.approx(1e-4, rel=0.01)
    assert times["long"].median == pytest.approx(3e-3, rel=0.01)


def test_times_are_per_unit_and_failures_are_listed_separately(clock):
    def fails() -> None:
        raise OSError("gone")

    work = {"sleep": lambda: clock.sleep(0.01), "fails": fails}
    times, failed = measure(work, units=10, cuda=False, seconds=0.1, repeats=5)
    assert times["sleep"].minimum == pytest.approx(0.001, rel=0.01)
    assert failed == {"fails": "OSError: gone"}


def test_a_contender_may_time_itself():
    work = {"ours": lambda: 0.002, "peer": lambda: 0.004}
    times, failed = measure(work, units=10, cuda=False, seconds=0.1, repeats=5, self_timed=True)
    assert {name: (timing.median, timing.n) for name, timing in times.items()} == {
        "ours": (0.002, 5),
        "peer": (0.004, 5),
    }
    assert not failed


def test_python_time_of_a_call_ignores_interruptions(monkeypatch):
    number, clock = 0, 0.0

    def call() -> None:
        nonlocal number, clock
        number += 1
        clock += 1.0 if number % (ops.BURSTS * ops.CALLS) == 7 else 2e-5  # another process runs, once per sample

    monkeypatch.setattr(ops, "time", SimpleNamespace(perf_counter=lambda: clock))
    times, _ = measure({"call": ops._python_time(call)}, units=1, cuda=False, seconds=5.0, repeats=6, self_timed=True)
    assert number == (6 + WARM_UPS) * ops.BURSTS * ops.CALLS
    assert times["call"].median == pytest.approx(2e-5)
    assert times["call"].spread < 1e-6


@pytest.mark.parametrize("taken", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_time_fails_its_contender_only(taken):
    work = {"fine": lambda: 1e-3, "odd": lambda: taken}
    times, failed = measure(work, units=1, cuda=False, seconds=0.1, repeats=5, self_timed=True)
    assert set(times) == {"fine"}
    assert f"a sample took {taken} s, which is not a time" in failed["odd"]


def test_one_line_reason():
    assert (
        one_line_reason(RuntimeError("backend raised:\n\n  no compiler\nmore"))
        == "RuntimeError: backend raised: no compiler"
    )
    assert one_line_reason(ValueError("one\ntwo")) == "ValueError: one"
