from __future__ import annotations

import pytest

from onelaunch.bench.memory_timeline import engine_timeline, step_timeline
from tests.bench.runs import make

pytestmark = pytest.mark.usefixtures("one_thread")


def test_memory_over_a_step_counts_live_bytes():
    run = make(hidden=64)
    timeline = step_timeline(run)
    assert len(timeline["operations"]) == len(timeline["bytes"]) > 10
    assert any("addmm" in name for name in timeline["operations"])
    weights = 4 * sum(p.numel() for p in run.model.parameters())
    assert min(timeline["bytes"]) >= 3 * weights  # parameters and Adam's two states outlive the step
    assert max(timeline["bytes"]) >= 4 * weights + 4 * 32 * 64  # gradients and the hidden activations


def test_our_eager_engine_needs_about_the_memory_of_the_plain_loop():
    plain, ours = step_timeline(make(hidden=64)), engine_timeline(make(hidden=64))
    assert len(ours["operations"]) == len(ours["bytes"])
    assert max(ours["bytes"]) == pytest.approx(max(plain["bytes"]), rel=0.1)
