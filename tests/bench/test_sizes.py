"""`compare --sizes`: the time per step of each contender at each hidden size."""

from __future__ import annotations

import pytest

from onelaunch.bench.contenders import EAGER, OurEngine
from onelaunch.bench.sizes import time_sizes, time_steps
from onelaunch.bench.step_peers import GRAPH, UNROLLED
from onelaunch.report.remarks import is_red, remarks
from tests.bench.runs import Pretender, make

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # PyTorch's own, when torch.compile is first used
]


@pytest.mark.usefixtures("no_compiler")
def test_sizes_are_timed_for_all_contenders(monkeypatch):
    monkeypatch.setattr("onelaunch.bench.sizes.SAMPLE_SECONDS", 1e-3)
    results: dict = {}
    time_sizes([8, 16], lambda hidden: make(hidden=hidden, engine="cpu"), lambda line: None, results)
    assert results["hidden"] == [8, 16]
    assert results["auto"] == {"8": "onelaunch cpu", "16": "onelaunch cpu"}
    assert results["absent"].pop("torch.compile") == dict.fromkeys(("8", "16"), "RuntimeError: no compiler")
    assert all(set(by_size) == {"8", "16"} and all(by_size.values()) for by_size in results["absent"].values())
    assert set(results["step_seconds"]) | set(results["absent"]) == {EAGER, GRAPH, UNROLLED, "onelaunch cpu"}
    for by_size in results["step_seconds"].values():
        assert all(0 < by_size[size]["minimum"] <= by_size[size]["median"] for size in ("8", "16"))


@pytest.mark.parametrize("call", [1, 1000])
@pytest.mark.parametrize(("once", "step"), [(0.0, 1e-3), (0.05, 1e-5), (0.5, 1e-4), (2.0, 0.4), (0.02, 1e-6)])
def test_one_time_cost_is_not_in_the_time_per_step(once, step, call):
    pretender = Pretender(once, step, call)
    timings, errors = time_steps([pretender], make())
    assert not errors
    timing = timings["pretender"]
    assert timing["median"] == pytest.approx(step, rel=1e-3)
    assert timing["n"] >= 3
    assert len(pretender.asked) < 20
    assert max(pretender.asked) <= max(100_000, 2 * call)


def test_contenders_are_timed_in_turns_and_may_raise():
    order: list[str] = []

    class Noted(Pretender):
        def __init__(self, name: str, raises_at: int = 0) -> None:
            super().__init__(0.0, 1e-3)
            self.name, self.raises_at = name, raises_at

        def train(self, run):
            order.append(self.name)
            if order.count(self.name) == self.raises_at:
                raise SystemExit("enough")
            return super().train(run)

    timings, errors = time_steps([Noted("a"), Noted("b", raises_at=1), Noted("c"), Noted("d", raises_at=8)], make())
    assert order[-5:] == ["a", "c", "d", "a", "c"]  # after the runs that set the pace of each
    assert set(timings) == {"a", "c"}
    assert errors == dict.fromkeys(("b", "d"), ("SystemExit: enough", False))


def test_a_size_that_does_not_fit_is_left_out(no_compiler, monkeypatch):
    monkeypatch.setattr("onelaunch.bench.sizes.SAMPLE_SECONDS", 1e-3)
    results: dict = {}
    sizes = [8, 10**12, 10**20]
    time_sizes(sizes, lambda hidden: make(hidden=hidden, engine="eager"), lambda line: None, results)
    assert results["hidden"] == [8]
    assert list(results["left_out"]) == [str(size) for size in sizes[1:]]
    assert all("do not fit into memory" in reason for reason in results["left_out"].values())
    reported = remarks({"contenders": {}, "sizes": results})
    assert [kind for kind, _ in reported] == ["bad", "bad"]
    assert "Hidden size 1000000000000 was not timed: layers=[5, 1000000000000, 3] do not fit" in reported[0][1]


@pytest.mark.parametrize(("error", "red"), [(ValueError("no"), True), (MemoryError(), False)])
def test_an_engine_of_ours_that_raises_at_a_size_is_red(monkeypatch, no_compiler, error, red):
    """Unless it ran out of memory, which may happen to any contender."""

    def raises(self, run):
        raise error

    monkeypatch.setattr(OurEngine, "train", raises)
    monkeypatch.setattr("onelaunch.bench.sizes.SAMPLE_SECONDS", 1e-3)
    results: dict = {}
    time_sizes([8], lambda hidden: make(hidden=hidden, engine="cpu"), lambda line: None, results)
    assert "8" in results["absent"]["onelaunch cpu"]
    found = {"contenders": {}, "sizes": results}
    assert is_red(found) == red
    assert remarks(found) == ([("bad", "onelaunch cpu failed at hidden size 8: ValueError: no")] if red else [])
