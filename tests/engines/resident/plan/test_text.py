"""The description of a plan names its network, placement, memory, exchanges and phases."""

from __future__ import annotations

import re

import pytest

from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import ROW_TILE, WARPS
from tests.engines.resident.planning import LAYERS, forced_plan, plan_of, rows_plan


def assert_complete(plan: Plan) -> str:
    text = plan.describe()
    for region in plan.shared.regions.values():
        assert re.search(rf" {region.bytes:,}  {region.name}$", text, re.MULTILINE)
    for name in (*plan.exchange_names().values(), *plan.phase_names()):
        assert name in text or plan.blocks == 1
    assert max(map(len, text.splitlines())) < 180
    return text


def test_a_plan_by_units():
    plan = plan_of(LAYERS, uint8_rows=True)
    text = assert_complete(plan)
    assert text.startswith("resident: 784-128-128-128-10, batch 32, bf16, sgd\n")
    assert f"a cluster of {plan.blocks} blocks" in text
    assert "layer 0: linear 784 -> 128, relu: block b owns units" in text
    assert f"shared memory of a block: {plan.shared.size:,} bytes" in text


@pytest.mark.parametrize(
    "plan",
    [
        forced_plan([20, 40, 24, 5], 5, False, 32, batch=100),
        forced_plan([20, 40, 5], 1, False, 32),
        rows_plan([9, 8, 3], 1, 16),
    ],
)
def test_other_placements(plan):
    assert_complete(plan)


def test_a_plan_by_rows_says_who_takes_a_tile():
    plan = plan_of([64, 64, 64, 16], batch=256)
    assert isinstance(plan, RowsPlan)
    text = assert_complete(plan)
    assert "each has the whole network and its part of the rows" in text
    at_once = min(plan.rows, WARPS // plan.team * ROW_TILE)
    assert f"{at_once} of them at once, a tile of 16 per team of {plan.team} warps" in text
