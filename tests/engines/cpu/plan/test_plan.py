"""The plan: buffers do not overlap, partitions cover the work; no LLVM, no run."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from torch import nn

from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.engines.cpu.plan.target import Target
from onelaunch.run.parse import parse_network
from tests.pairwise import cases

WIDE = Target("x86_64-none", "test", "", 16, 32, True, True, "0")
NARROW = Target("aarch64-none", "test", "", 4, 32, True, True, "0")


def plan_of(
    *layers: nn.Module, batch: int = 32, partitions: int = 2, target: Target = WIDE, optimizer: str = "adam"
) -> Plan:
    settings = Settings(
        parse_network(nn.Sequential(*layers)), batch, 256, partitions, optimizer, False, False, False, "cross_entropy", False,
        False, validates=True,
    )  # fmt: skip
    return Plan(settings, target)


NETWORKS = {
    "plain": (nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
    "batch norms": (
        nn.BatchNorm1d(9),
        nn.Linear(9, 33),
        nn.BatchNorm1d(33),
        nn.GELU(),
        nn.Dropout(0.5),
        nn.Linear(33, 1000),
    ),
    "one": (nn.Linear(3, 1),),
    "deep": tuple(nn.Linear(40 + i, 41 + i) for i in range(6)),
    "narrow": (nn.Linear(9, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 3)),
}


@pytest.mark.parametrize(
    ("name", "batch", "partitions", "target"), cases(tuple(NETWORKS), (1, 37, 64, 200), (1, 2, 5), (WIDE, NARROW))
)
def test_buffers_do_not_overlap_and_are_inside_the_arena(
    name: str, batch: int, partitions: int, target: Target
) -> None:
    plan = plan_of(*NETWORKS[name], batch=batch, partitions=partitions, target=target)
    validation = [buffer for buffer in plan.buffers.values() if buffer.name.startswith("validation.")]
    whole = [buffer for buffer in plan.buffers.values() if buffer.name == "parameters"]
    inside = [b for b in plan.buffers.values() if whole[0].offset <= b.offset < whole[0].offset + whole[0].size]
    others = [buffer for buffer in plan.buffers.values() if buffer not in validation]
    for group in ([b for b in others if b not in inside] + whole, [b for b in inside if b not in whole], validation):
        ordered = sorted(group, key=lambda buffer: buffer.offset)
        for first, second in itertools.pairwise(ordered):
            assert first.offset + first.size <= second.offset, (first, second)
    for buffer in plan.buffers.values():
        assert buffer.offset % 64 == 0
        assert buffer.offset + buffer.size <= plan.size


@pytest.mark.parametrize("partitions", [1, 2, 3, 7])
@pytest.mark.parametrize("name", NETWORKS)
def test_shares_cover_everything_once(name: str, partitions: int) -> None:
    plan = plan_of(*NETWORKS[name], partitions=partitions)
    for stage in plan.stages:
        panels = [panel for partition in range(partitions) for panel in plan.owned_panels(stage, partition)]
        assert panels == plan.panels(stage)
        columns = [unit for partition in range(partitions) for unit in range(*plan.owned_columns(stage, partition))]
        assert columns == list(range(stage.width))
    for rows in (1, 16, 37, 256):
        assert [row for partition in range(partitions) for row in range(*plan.owned_rows(partition, rows))] == list(
            range(rows)
        )


@pytest.mark.parametrize(("batch", "partitions"), [(64, 2), (99, 2), (99, 3), (1000, 8)])
@pytest.mark.parametrize("target", [WIDE, NARROW])
def test_rows_of_a_plan_by_rows_are_whole_batch_panels(batch: int, partitions: int, target: Target) -> None:
    """Otherwise two partitions would write one panel of dX."""
    plan = plan_of(*NETWORKS["narrow"], batch=batch, partitions=partitions, target=target)
    assert plan.by_rows
    owned = [panel for partition in range(partitions) for panel in plan.owned_batch_panels(partition)]
    assert owned == plan.batch_panels()
    for partition in range(partitions):
        first, last = plan.owned_rows(partition, batch)
        panels = plan.owned_batch_panels(partition)
        assert panels[0].first == first
        assert panels[-1].first < last <= panels[-1].first + panels[-1].width


def test_rows_are_divided_where_activations_outnumber_weights() -> None:
    def by_rows(*widths: int, batch: int, partitions: int = 2, **options: bool) -> bool:
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        plan = plan_of(*layers[:-1], batch=batch, partitions=partitions)
        return Plan(dataclasses.replace(plan.settings, **options), WIDE).by_rows

    assert by_rows(30, 64, 64, 2, batch=128)
    assert not by_rows(30, 64, 64, 2, batch=128, partitions=1)
    assert not by_rows(30, 64, 64, 2, batch=63)  # fewer than 32 rows for one partition
    assert not by_rows(30, 64, 64, 2, batch=128, partitions=5)
    assert not by_rows(30, 64, 64, 2, batch=128, clips=True)
    assert not by_rows(784, 128, 128, 128, 10, batch=32)
    assert not by_rows(784, 512, 512, 10, batch=128)
    assert not plan_of(*NETWORKS["batch norms"], batch=1000).by_rows


def test_two_partitions_of_few_weights_have_a_copy_of_them_each() -> None:
    def private(*widths: int, batch: int = 128, partitions: int = 2) -> bool:
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        plan = plan_of(*layers[:-1], batch=batch, partitions=partitions)
        assert plan.gradient_shift(0) == plan.copy_stride * (partitions if plan.private_weights else 1)
        last = plan.gradient_shift(partitions - 1) + plan.state_stride
        assert plan.buffers["parameters"].size == (last if plan.by_rows else plan.copy_stride)
        return plan.private_weights

    assert private(30, 64, 64, 2)
    assert not private(30, 64, 64, 2, batch=63)  # by columns
    assert not private(30, 64, 64, 2, partitions=4)
    assert not private(64, 96, 96, 10, batch=200)


def test_activation_rows_are_an_odd_number_of_lines_apart() -> None:
    plan = plan_of(*NETWORKS["plain"])
    assert [plan.pitch(stage) // 16 % 2 for stage in plan.stages] == [1, 1, 1]


def test_the_plan_reads_well() -> None:
    rows = str(plan_of(*NETWORKS["narrow"], batch=64))
    assert "work split into 2 partitions, each with its rows of the batch in all layers" in rows
    assert "and a copy of the weights" in rows
    assert "update with the sum of all partitions' gradients" in rows
    text = str(plan_of(*NETWORKS["batch norms"]))
    assert "stage 1: linear 9 -> 33, batch norm, gelu, dropout 0.5" in text
    assert "work split into 2 partitions" in text
    assert "MiB" in text
