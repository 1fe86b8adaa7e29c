"""The memory planner against a brute-force checker, on random graphs."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.engines.graph.plan.memory import ALIGNMENT, Buffer, Layout, lifetimes, lower_bound, plan


def check(layout: Layout) -> None:
    """Moment by moment, byte range by byte range: whatever is alive together lies apart, aligned and inside."""
    for buffer in layout.buffers:
        offset = layout.offsets[buffer.name]
        assert offset % ALIGNMENT == 0
        assert offset >= 0
        assert offset + buffer.nbytes <= layout.nbytes
    for moment in range(max((b.last for b in layout.buffers), default=-1) + 1):
        alive = [b for b in layout.buffers if b.first <= moment <= b.last and b.nbytes]
        for one, other in itertools.combinations(alive, 2):
            begin, other_begin = layout.offsets[one.name], layout.offsets[other.name]
            assert begin + one.nbytes <= other_begin or other_begin + other.nbytes <= begin, (one, other, moment)


def brute_force_bound(buffers: list[Buffer]) -> int:
    """The most aligned bytes alive at one moment, counted moment by moment."""
    last = max(b.last for b in buffers)
    return max(
        sum(-(-b.nbytes // ALIGNMENT) * ALIGNMENT for b in buffers if b.first <= moment <= b.last)
        for moment in range(last + 1)
    )


def random_graph(seed: int) -> list[Buffer]:
    """A chain of operations with long and short edges, as a forward and a backward pass make them."""
    draw = random.Random(seed)
    moments = draw.randint(4, 40)
    buffers = []
    for number in range(draw.randint(3, 60)):
        first = draw.randrange(moments)
        mirrored = moments - 1 - first  # an activation is read again by its backward pass
        last = max(first, mirrored) if draw.random() < 0.4 else min(moments - 1, first + draw.randrange(6))
        buffers.append(Buffer(f"b{number}", draw.choice([1, 4096, 65_536, 1 << 20]) * draw.randint(1, 9), first, last))
    return buffers


@pytest.mark.parametrize("seed", range(60))
def test_within_five_per_cent_of_the_bound(seed):
    buffers = random_graph(seed)
    layout = plan(buffers)
    check(layout)
    assert layout.lower_bound == brute_force_bound(buffers)
    assert layout.lower_bound <= layout.nbytes <= 1.05 * layout.lower_bound


@pytest.mark.parametrize("seed", range(40))
def test_graphs_of_another_kind(seed):
    """Sizes without a common measure and lifetimes of every length, where a layout at the bound need not exist."""
    draw = random.Random(seed)
    buffers = []
    for number in range(40):
        first = draw.randrange(30)
        buffers.append(Buffer(f"b{number}", draw.randint(1, 10**6), first, draw.randrange(first, 30)))
    layout = plan(buffers)
    check(layout)
    assert layout.nbytes <= 1.05 * layout.lower_bound


def test_a_thousand_buffers_take_seconds():
    draw = random.Random(1)
    begins = [draw.randrange(2000) for _ in range(1000)]
    buffers = [
        Buffer(f"b{i}", draw.randint(1, 10**6), first, first + draw.randrange(50)) for i, first in enumerate(begins)
    ]
    begin = time.perf_counter()
    layout = plan(buffers)
    assert time.perf_counter() - begin < 30
    assert layout.nbytes <= 1.1 * layout.lower_bound


@pytest.mark.parametrize(
    "bad", [[Buffer("a", -1, 0, 1)], [Buffer("a", 1, 2, 1)], [Buffer("a", 1, 0, 1), Buffer("a", 2, 3, 4)]]
)
def test_buffers_that_cannot_be(bad):
    with pytest.raises(ValueError, match="a name each"):
        plan(bad)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_nothing_alive_overlaps(triples):
    buffers = [Buffer(f"b{i}", size, min(a, b), max(a, b)) for i, (size, a, b) in enumerate(triples)]
    layout = plan(buffers)
    check(layout)
    assert layout.nbytes >= lower_bound(buffers)


def test_the_checker_sees_an_overlap():
    buffers = (Buffer("a", 300, 0, 2), Buffer("b", 10, 2, 3))
    with pytest.raises(AssertionError):
        check(Layout(buffers, {"a": 0, "b": 256}, 512))
    check(Layout(buffers, {"a": 0, "b": 512}, 768))


def test_the_order_of_the_list_does_not_matter():
    buffers = random_graph(7)
    again = plan(reversed(buffers))
    assert plan(buffers).offsets == dict(again.offsets)


def test_buffers_that_never_meet_share_their_bytes():
    layout = plan([Buffer("early", 1024, 0, 1), Buffer("late", 1024, 2, 3), Buffer("whole", 256, 0, 3)])
    assert layout.offsets["early"] == layout.offsets["late"]
    assert layout.nbytes == 1280
    assert str(layout) == "3 buffers in one arena of 1,280 bytes (2,304 apart)"


def test_lifetimes_follow_the_uses():
    sizes = {"w": 10, "h": 20, "dh": 30, "never": 5}
    found = lifetimes(sizes, [("w", "h"), ("h",), ("h", "dh"), ("w", "dh")], kept=["w"])
    assert found == [Buffer("w", 10, 0, 3), Buffer("h", 20, 0, 2), Buffer("dh", 30, 2, 3)]
