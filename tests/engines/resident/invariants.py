"""What must hold for every plan that may run: one owner per weight, regions that do not overlap, sizes that agree."""

from __future__ import annotations

import itertools

from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import K_TILE, MAX_ROWS, MAX_SUMS, N_TILE, ROW_TILE, WARPS
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from tests.engines.resident.exchanges import expected_bytes
from tests.engines.resident.units_simulator import owned


def assert_whole(plan: Plan) -> None:
    assert not plan.refusal
    assert plan.shared.size <= plan.chip.shared_bytes
    assert plan.blocks <= plan.chip.multiprocessors
    for memory in (plan.shared, plan.exchange):
        _assert_no_overlap(memory)
    _assert_exchanges_agree(plan)
    assert plan.rows % ROW_TILE == 0
    assert plan.rows <= MAX_ROWS
    at_once = plan.rows
    for layer in plan.layers:
        assert layer.k_tiles * K_TILE >= layer.stage.linear.inputs
    if isinstance(plan, RowsPlan):
        at_once *= plan.blocks
        for layer in plan.layers:
            _assert_every_tile_has_one_slot(plan, layer)
    if isinstance(plan, UnitsPlan):
        assert plan.row_tiles % plan.row_tiles_at_once == 0
        widest = max(layer.n_tiles for layer in plan.layers)
        assert plan.row_tiles_at_once == 1 or plan.row_tiles_at_once * widest <= MAX_SUMS
        for layer in plan.layers:
            _assert_every_weight_has_one_owner(plan, layer)
    assert (plan.micro_batches - 1) * at_once < plan.settings.batch <= plan.micro_batches * at_once


def _assert_every_weight_has_one_owner(plan: UnitsPlan, layer: Layer) -> None:
    linear = layer.stage.linear
    if not layer.first:
        before = plan.layers[layer.index - 1]
        assert (layer.input_tiles, layer.k_tiles) == (before.n_tiles, before.next_k_tiles)
    parts = [owned(layer, rank) for rank in range(plan.blocks)]
    pieces = {(units.start, units.stop, inputs.start, inputs.stop) for units, inputs in parts}
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
    assert layer.n_tiles * N_TILE >= layer.stage.linear.outputs
    assert WARPS * slots >= layer.k_tiles * layer.n_tiles
    assert first + slots <= plan.slots
    if not layer.last:
        after = plan.layers[layer.index + 1]
        assert first + slots == plan.first_slot(after)
        assert after.k_tiles * 2 == layer.n_tiles


def _assert_no_overlap(memory: Memory) -> None:
    ordered = sorted(memory.regions.values(), key=lambda region: region.offset)
    for first, second in itertools.pairwise(ordered):
        assert first.offset + first.bytes <= second.offset, (first, second)
    assert all(region.offset % 128 == 0 for region in ordered)
    assert memory.size >= max((region.offset + region.bytes for region in ordered), default=0)


def _assert_exchanges_agree(plan: Plan) -> None:
    sizes = plan.exchanged_bytes()
    assert sorted(sizes) == sorted(plan.exchange_names()) == list(range(plan.exchanges))
    if plan.blocks == 1:
        return
    expected = [expected_bytes(plan, rank) for rank in range(plan.blocks)]
    assert expected[0] == sizes
    assert all(bytes_of_rank[number] <= sizes[number] for bytes_of_rank in expected for number in sizes)
    assert not plan.cluster or max(sizes.values()) < 2**20, "a barrier counts up to 2**20 - 1 bytes"
    if isinstance(plan, UnitsPlan):
        slots = plan.shared if plan.cluster else plan.exchange
        for layer in filter(plan.publishes, plan.layers[: plan.hidden]):
            values = slots.regions[f"layer {layer.index}: values of all"]
            assert values.bytes >= plan.out_buffers(layer) * sizes[plan.values_exchange(layer)]
