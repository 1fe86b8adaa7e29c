"""Plans: everything owned once and in its place, sizes that agree with the source, refusals that name the reason."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onelaunch.device import A100, H200
from onelaunch.engines.resident.plan.describe import describe, exchanged_bytes
from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.placement import choose_plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import (
    MOST_BATCH,
    MOST_OUTPUTS,
    MOST_ROWS,
    MOST_SUMS,
    ROW_TILE,
    STEP,
    TILE,
    WARPS,
)
from onelaunch.engines.resident.plan.stages import stages_of
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.source.source import phase_names
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.run.network import parse_network
from tests.engines.resident.exchanges import expected_bytes
from tests.engines.resident.planning import LAYERS, forced_plan, plan_of, rows_plan, settings_of
from tests.engines.resident.units_simulator import owned


def assert_whole(plan: Plan) -> None:
    """What must hold for every plan that may run."""
    assert not plan.refusal
    assert plan.shared.size <= plan.chip.shared_bytes
    assert plan.blocks <= plan.chip.multiprocessors
    _assert_every_weight_has_one_owner(plan)
    for memory in (plan.shared, plan.exchange):
        _assert_apart(memory)
    _assert_exchanges_agree(plan)
    assert plan.rows % ROW_TILE == 0
    assert plan.rows <= MOST_ROWS
    at_once = plan.rows * (plan.blocks if isinstance(plan, RowsPlan) else 1)
    assert (plan.micro_batches - 1) * at_once < plan.settings.batch <= plan.micro_batches * at_once
    assert plan.row_tiles % plan.group == 0
    assert plan.group == 1 or plan.group * max(layer.tiles for layer in plan.layers) <= MOST_SUMS


def _assert_every_weight_has_one_owner(plan: Plan) -> None:
    for layer in plan.layers:
        linear = layer.stage.linear
        assert layer.steps * STEP >= linear.inputs
        if isinstance(plan, RowsPlan):
            _assert_every_tile_has_one_slot(plan, layer)
            continue
        if not layer.first:
            before = plan.layers[layer.index - 1]
            assert (layer.input_tiles, layer.steps) == (before.tiles, before.output_steps)
        pieces = {
            (*vars_of(units), *vars_of(inputs)) for units, inputs in (owned(layer, b) for b in range(plan.blocks))
        }
        assert plan.blocks == len(pieces) or (layer.last and not layer.owned_by_input)
        covered = sum(
            max(0, min(stop, linear.outputs) - start) * max(0, min(last, linear.inputs) - first)
            for start, stop, first, last in pieces
        )
        assert covered == linear.outputs * linear.inputs
        for a, b in itertools.combinations(pieces, 2):
            assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2], (a, b)


def _assert_every_tile_has_one_slot(plan: RowsPlan, layer: Layer) -> None:
    slots, first = plan.layer_slots(layer), plan.first_slot(layer)
    assert layer.tiles * TILE >= layer.stage.linear.outputs
    assert WARPS * slots >= layer.steps * layer.tiles
    assert layer.last or first + slots == plan.first_slot(plan.layers[layer.index + 1])
    assert first + slots <= plan.slots
    assert layer.last or plan.layers[layer.index + 1].steps * 2 == layer.tiles


def vars_of(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def _assert_apart(memory: Memory) -> None:
    ordered = sorted(memory.regions.values(), key=lambda region: region.offset)
    for first, second in itertools.pairwise(ordered):
        assert first.offset + first.bytes <= second.offset, (first, second)
    assert all(region.offset % 128 == 0 for region in ordered)
    assert memory.size >= max((region.offset + region.bytes for region in ordered), default=0)


def _assert_exchanges_agree(plan: Plan) -> None:
    sizes = exchanged_bytes(plan)
    assert sorted(sizes) == sorted(plan.exchange_names()) == list(range(plan.exchanges))
    if plan.blocks == 1:
        return
    waited_for = [expected_bytes(plan, rank) for rank in range(plan.blocks)]
    assert waited_for[0] == sizes
    assert all(expected[number] <= sizes[number] for expected in waited_for for number in sizes)
    assert not plan.cluster or max(sizes.values()) < 2**20, "a barrier counts up to 2**20 - 1 bytes"
    if isinstance(plan, RowsPlan):
        return
    slots = plan.shared if plan.cluster else plan.exchange
    for layer in filter(plan.publishes, plan.layers[: plan.hidden]):
        values = slots.regions[f"layer {layer.index}: values of all"]
        assert values.bytes >= plan.out_buffers(layer) * sizes[plan.values_exchange(layer)]


@st.composite
def networks(draw: st.DrawFn) -> dict:
    hidden = draw(st.lists(st.integers(1, 300), max_size=4))
    return {
        "widths": [draw(st.integers(1, 900)), *hidden, draw(st.integers(1, MOST_OUTPUTS))],
        "batch": draw(st.integers(1, 1100)),
        "precision": draw(st.sampled_from(["bf16", "fp16", "tf32", "fp32"])),
        "optimizer": draw(st.sampled_from(["sgd", "adam", "adamw"])),
        "loss": draw(st.sampled_from(["cross_entropy", "mse"])),
        "bytes_input": draw(st.booleans()),
        "validates": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None)
@given(networks(), st.sampled_from([H200, A100]))
def test_random_networks_get_a_whole_plan_or_a_reason(given_, chip):
    try:
        plan = plan_of(**given_, chip=chip)
    except UnsupportedNetworkError as refusal:
        reason = str(refusal)
    else:
        reason = ""
    if reason:
        assert re.search("KiB of shared memory|too wide", reason)
        return
    assert_whole(plan)
    assert not plan.cluster or chip.clusters
    assert len(describe(plan).splitlines()) > 15


@pytest.mark.parametrize("blocks", [1, 2, 16])
def test_shares_of_rows_are_whole(blocks):
    assert_whole(rows_plan([40, 50, 7, 50, 3], blocks, 32, batch=70))


@pytest.mark.parametrize(("blocks", "cluster"), [(1, False), (2, True), (16, True), (3, False), (13, False)])
def test_forced_placements_are_whole_too(blocks, cluster):
    assert_whole(forced_plan([40, 50, 7, 50, 3], blocks, cluster, 32, batch=70))


@pytest.mark.parametrize("bytes_input", [True, False])
def test_a_small_network_trains_in_a_cluster(bytes_input):
    plan = plan_of(LAYERS, bytes_input=bytes_input)
    assert plan.cluster
    assert plan.micro_batches == 1
    assert not any(layer.masters_shared for layer in plan.layers)


def test_a_wide_network_trains_over_the_grid():
    plan = plan_of([784, 784, 784, 784, 10], batch=64, bytes_input=True)
    assert not plan.cluster
    assert 16 < plan.blocks <= H200.multiprocessors
    assert_whole(plan)


def test_rows_are_not_divided_where_weights_would_spill():
    """54 tiles of masters and as many of gradients: a thread has no registers for them."""
    refused = rows_plan([784, 64, 64, 10], 1, 16, batch=128).refusal
    assert re.search("108 tiles of weights and gradients do not fit", refused)
    assert not isinstance(plan_of([784, 64, 64, 10], batch=128, chip=A100), RowsPlan)


def test_a_tiny_network_or_one_linear_stays_in_one_block():
    assert plan_of([4, 8, 3]).blocks == 1
    assert plan_of([784, 10]).blocks == 1


def test_a_chip_without_clusters_gets_a_grid():
    plan = plan_of(LAYERS, chip=A100)
    assert not plan.cluster
    assert plan.blocks > 1
    assert "this chip has no clusters" in describe(plan)
    with pytest.raises(UnsupportedNetworkError):
        plan_of(LAYERS, chip=A100, blocks=8, cluster=True)


@pytest.mark.parametrize(
    ("widths", "changes", "reason"),
    [
        ([8, 16, MOST_OUTPUTS + 1], {}, f"{MOST_OUTPUTS + 1} outputs, this engine takes up to {MOST_OUTPUTS}"),
        ([8, 16, 4], {"batch": MOST_BATCH + 1}, f"batch_size={MOST_BATCH + 1} is above the {MOST_BATCH} rows"),
        ([784, 4096, 4096, 10], {}, r"does not fit on the chip: \d+ blocks need \d+ KiB of shared memory each, 227 are there"),
        ([100_000, 10], {}, "does not fit on the chip: 1 blocks need"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_reason(widths, changes, reason):
    with pytest.raises(UnsupportedNetworkError, match=reason):
        plan_of(widths, **changes)


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)], "BatchNorm1d is not in this engine"),
        ([nn.Dropout(0.1), nn.Linear(4, 2)], "before the first Linear"),
        ([nn.ReLU(), nn.Linear(4, 2)], "before the first Linear"),
    ],
)
def test_layers_it_does_not_take_are_named(layers, reason):
    with pytest.raises(UnsupportedNetworkError, match=reason):
        stages_of(parse_network(nn.Sequential(*layers)))


def test_stages_group_what_follows_a_linear():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2), nn.Tanh())
    assert [len(stage.chain) for stage in stages_of(parse_network(model))] == [2, 1]


@pytest.mark.parametrize(("batch", "by_rows"), [(1000, False), (4000, True)])
def test_more_rows_than_fit_become_several_passes(batch, by_rows):
    plan = plan_of([64, 64, 64, 16], batch=batch, by_rows=by_rows)
    assert plan.micro_batches > 1
    assert_whole(plan)
    assert f"a batch takes {plan.micro_batches} passes" in describe(plan)


def test_a_narrow_network_with_many_rows_shares_them():
    plan = plan_of([64, 64, 64, 16], batch=256)
    assert isinstance(plan, RowsPlan)
    assert_whole(plan)
    text = describe(plan)
    assert "each has the whole network and its share of the rows" in text
    assert all(name in text for name in (*plan.exchange_names().values(), *phase_names(plan)))


def test_weights_move_to_shared_memory_when_registers_run_out():
    plan = choose_plan(settings_of([600, 48, 10], batch=16), H200, blocks=1, by_rows=False, working=160)
    assert plan.layers[0].masters_shared
    assert "masters in shared memory" in describe(plan)
    free = choose_plan(settings_of(LAYERS, optimizer="adam"), H200, blocks=16, cluster=True, by_rows=False)
    crowded = choose_plan(
        settings_of(LAYERS, optimizer="adam"), H200, blocks=16, cluster=True, by_rows=False, working=184
    )
    assert sum(layer.states_shared for layer in crowded.layers) > sum(layer.states_shared for layer in free.layers)


def test_the_plan_reads_well():
    plan = plan_of(LAYERS, bytes_input=True)
    text = describe(plan)
    assert text.startswith("resident: 784-128-128-128-10, batch 32, bf16, sgd\n")
    assert f"a cluster of {plan.blocks} blocks" in text
    assert "layer 0: linear 784 -> 128, relu: block b owns units" in text
    assert f"shared memory of a block: {plan.shared.size:,} bytes" in text
    for region in plan.shared.regions.values():
        assert re.search(rf" {region.bytes:,}  {region.name}$", text, re.MULTILINE)
    for name in (*plan.exchange_names().values(), *phase_names(plan)):
        assert name in text
    assert max(map(len, text.splitlines())) < 180


def test_a_plan_by_rows_says_who_takes_a_tile() -> None:
    plan = choose_plan(settings_of([64, 64, 64, 16], batch=256), H200)
    assert isinstance(plan, RowsPlan)
    teams = WARPS // plan.team
    assert f"{min(plan.rows, teams * 16)} of them at once, a tile of 16 a team of {plan.team} warps" in describe(plan)


def test_what_does_not_fit_needs_more_than_is_there() -> None:
    request = settings_of([1024, 128, 10], batch=32, precision="fp32", optimizer="adam")
    with pytest.raises(UnsupportedNetworkError, match=r"need 228 KiB of shared memory each, 227 are there"):
        choose_plan(request, replace(H200, largest_cluster=8))
