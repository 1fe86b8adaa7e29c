"""The memory planner against a brute-force checker, on random lifetimes and on the recorded networks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.engines.graph.plan.memory import Buffer, Layout, lifetimes, lower_bound, plan
from onelaunch.engines.graph.plan.plan import plan_step
from tests.engines.graph.plan.planning import check, stages

BUFFERS = st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12)


def buffers_of(triples: list[tuple[int, int, int]]) -> list[Buffer]:
    return [Buffer(f"b{i}", size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(triples)]


@settings(max_examples=80)
@given(BUFFERS)
def test_buffers_alive_together_do_not_overlap(triples):
    buffers = buffers_of(triples)
    layout = plan(buffers)
    check(layout)
    most = max(sum(b.size for b in buffers if b.first <= moment <= b.last) for moment in range(10))
    assert lower_bound(buffers) == most <= layout.nbytes
    assert plan(reversed(buffers)).offsets == layout.offsets


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("widths", "batch", "activation", "states"),
    [  # those of docs/large-networks.md and benchmarks/results
        ([784, 1024, 1024, 1024, 10], 256, "gelu", 2),
        ([784, 2048, 2048, 2048, 10], 32, "relu", 0),
        ([784, 2048, 2048, 2048, 10], 32, "relu", 2),
        ([784, 8192, 8192, 8192, 10], 32, "relu", 2),
        ([784, 1024, 1024, 10], 4096, "relu", 1),
        ([64, 64, 64, 16], 262_144, "tanh", 1),
        ([784, 512, 512, 10], 512, "relu", 2),
    ],
)
@pytest.mark.parametrize("validation_rows", [0, 10_000])
def test_recorded_networks_reach_the_lower_bound(widths, batch, activation, states, precision, validation_rows):
    step = plan_step(
        stages(widths, activation), batch=batch, rows=60_000, steps_per_epoch=60_000 // batch + 1, precision=precision,
        validation_rows=validation_rows, states=states,
    )  # fmt: skip
    layout = step.layout()
    assert layout.nbytes == lower_bound(layout.buffers)


def test_the_checker_sees_an_overlap():
    buffers = (Buffer("a", 300, 0, 2), Buffer("b", 10, 2, 3))
    with pytest.raises(AssertionError):
        check(Layout(buffers, {"a": 0, "b": 256}, 512))
    check(Layout(buffers, {"a": 0, "b": 512}, 768))


def test_buffers_that_never_meet_share_their_bytes():
    layout = plan([Buffer("early", 1024, 0, 1), Buffer("late", 1024, 2, 3), Buffer("whole", 256, 0, 3)])
    assert layout.offsets["early"] == layout.offsets["late"]
    assert layout.nbytes == 1280
    assert str(layout) == "3 buffers in one arena of 1,280 bytes (2,304 without sharing)"


def test_lifetimes_follow_the_uses():
    sizes = {"w": 10, "h": 20, "dh": 30, "never": 5}
    found = lifetimes(sizes, [("w", "h"), ("h",), ("h", "dh"), ("w", "dh")], persistent=["w"])
    assert found == [Buffer("w", 10, 0, 3), Buffer("h", 20, 0, 2), Buffer("dh", 30, 2, 3)]
