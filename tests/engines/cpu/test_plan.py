"""The plan: buffers apart, work cut without gaps; no LLVM, no run."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.settings import Settings, useful_shares
from onelaunch.engines.cpu.plan.stages import stages_of
from onelaunch.engines.cpu.plan.target import Target
from onelaunch.run.network import parse_network

WIDE = Target("x86_64-none", "test", "", 16, 32, True, True, "0")
NARROW = Target("aarch64-none", "test", "", 4, 32, True, True, "0")


def plan_of(
    *layers: nn.Module, batch: int = 32, shares: int = 2, target: Target = WIDE, optimizer: str = "adam"
) -> Plan:
    settings = Settings(
        parse_network(nn.Sequential(*layers)), batch, 256, shares, optimizer, False, False, False, "cross_entropy", False,
        False, checks=True,
    )  # fmt: skip
    return Plan(settings, target)


NETWORKS = {
    "plain": (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
    "norms": (nn.BatchNorm1d(9), nn.Linear(9, 33), nn.BatchNorm1d(33), nn.GELU(), nn.Dropout(0.5), nn.Linear(33, 1000)),
    "one": (nn.Linear(3, 1),),
    "deep": tuple(nn.Linear(40 + i, 41 + i) for i in range(6)),
}


@pytest.mark.parametrize("target", [WIDE, NARROW], ids=["16 lanes", "4 lanes"])
@pytest.mark.parametrize("shares", [1, 2, 5])
@pytest.mark.parametrize("batch", [1, 37, 64])
@pytest.mark.parametrize("name", NETWORKS)
def test_buffers_lie_apart_and_inside(name: str, batch: int, shares: int, target: Target) -> None:
    plan = plan_of(*NETWORKS[name], batch=batch, shares=shares, target=target)
    check = [buffer for buffer in plan.buffers.values() if buffer.name.startswith("check.")]
    whole = [buffer for buffer in plan.buffers.values() if buffer.name == "parameters"]
    inside = [b for b in plan.buffers.values() if whole[0].offset <= b.offset < whole[0].offset + whole[0].size]
    others = [buffer for buffer in plan.buffers.values() if buffer not in check]
    for group in ([b for b in others if b not in inside] + whole, [b for b in inside if b not in whole], check):
        ordered = sorted(group, key=lambda buffer: buffer.offset)
        for first, second in itertools.pairwise(ordered):
            assert first.offset + first.size <= second.offset, (first, second)
    for buffer in plan.buffers.values():
        assert buffer.offset % 64 == 0
        assert buffer.offset + buffer.size <= plan.size


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_shares_cover_everything_once(name: str, shares: int) -> None:
    plan = plan_of(*NETWORKS[name], shares=shares)
    for stage in plan.stages:
        panels = [panel for share in range(shares) for panel in plan.owned_panels(stage, share)]
        assert panels == plan.panels(stage)
        columns = [unit for share in range(shares) for unit in range(*plan.owned_columns(stage, share))]
        assert columns == list(range(stage.width))
    for rows in (1, 16, 37, 256):
        assert [row for share in range(shares) for row in range(*plan.owned_rows(share, rows))] == list(range(rows))


def test_stages_group_what_follows_each_linear() -> None:
    stages = stages_of(parse_network(nn.Sequential(*NETWORKS["norms"])))
    assert [stage.width for stage in stages] == [9, 33, 1000]
    assert [stage.norms for stage in stages] == [(1,), (1,), ()]
    assert stages[1].stores_derivative(1)
    assert not stages[1].stores_derivative(0)


def test_activation_rows_are_an_odd_number_of_lines_apart() -> None:
    plan = plan_of(*NETWORKS["plain"])
    assert [plan.pitch(stage) // 16 % 2 for stage in plan.stages] == [1, 1, 1]


def test_small_networks_get_one_share_and_large_ones_all_threads() -> None:
    small = parse_network(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    large = parse_network(nn.Sequential(nn.Linear(784, 784), nn.ReLU(), nn.Linear(784, 10)))
    assert useful_shares(small, 32, 8) == 1
    assert useful_shares(large, 64, 8) == 8
    assert useful_shares(large, 64, 1) == 1


def test_the_plan_reads_well() -> None:
    text = str(plan_of(*NETWORKS["norms"]))
    assert "stage 1: linear 9 -> 33, batch norm, gelu, dropout 0.5" in text
    assert "work cut into 2 shares" in text
    assert "MiB" in text
