"""Plans of random networks and forced placements keep the invariants, or are refused with a reason."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.device import A100, H200
from onelaunch.engines.resident import OPTIMIZERS
from onelaunch.engines.resident.plan.settings import MAX_OUTPUTS, PLANES
from onelaunch.engines.stages import UnsupportedNetworkError
from tests.engines.resident.invariants import assert_whole
from tests.engines.resident.planning import forced_plan, plan_of, rows_plan


@st.composite
def networks(draw: st.DrawFn) -> dict:
    hidden = draw(st.lists(st.integers(1, 300), max_size=4))
    return {
        "widths": [draw(st.integers(1, 900)), *hidden, draw(st.integers(1, MAX_OUTPUTS))],
        "batch": draw(st.integers(1, 1100)),
        "precision": draw(st.sampled_from(list(PLANES))),
        "optimizer": draw(st.sampled_from(sorted(OPTIMIZERS))),
        "momentum": draw(st.booleans()),
        "loss": draw(st.sampled_from(["cross_entropy", "mse"])),
        "uint8_rows": draw(st.booleans()),
        "validates": draw(st.booleans()),
    }


@settings(max_examples=40)
@given(networks(), st.sampled_from([H200, A100]))
def test_random_networks_get_a_whole_plan_or_a_reason(given_, chip):
    try:
        plan = plan_of(**given_, chip=chip)
    except UnsupportedNetworkError as refusal:
        plan, reason = None, str(refusal)
    if plan is None:
        assert re.search("KiB of shared memory|too wide", reason)
        return
    assert_whole(plan)
    assert not plan.cluster or chip.clusters
    assert len(plan.describe().splitlines()) > 15


@pytest.mark.parametrize("blocks", [1, 2, 16])
def test_plans_by_rows_are_whole(blocks):
    assert_whole(rows_plan([40, 50, 7, 50, 3], blocks, 32, batch=70))


@pytest.mark.parametrize(("blocks", "cluster"), [(1, False), (2, True), (16, True), (3, False), (13, False)])
def test_forced_plans_by_units_are_whole(blocks, cluster):
    assert_whole(forced_plan([40, 50, 7, 50, 3], blocks, cluster, 32, batch=70))
