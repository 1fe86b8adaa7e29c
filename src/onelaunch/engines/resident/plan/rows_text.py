"""A plan by rows in words."""

from __future__ import annotations

from functools import partial

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.rows_layout import RowsLayout
from onelaunch.engines.resident.plan.settings import ROW_TILE
from onelaunch.engines.resident.plan.text import describe

PHASES = {
    "rows arrive": "waits for their copy",
    "fetch validation rows": "starts their copy, in a pass that does not train",
    "row tiles": "teams of warps take 16 rows each through all layers and back; write values and deltas",
    "meet": "the barrier of the block",
    "sum biases": "adds up the deltas of each unit; after the last pass of a step, sends the sums to all",
    "gradient": "reads the block's values and deltas; a warp sums the gradient of its tiles and sends it to their owners",
    "gradient and update": "a warp sums the gradient of a few of its tiles, writes their masters and copies, and goes on",
    "first gradient and update": "the same for the first layer, which alone reads the rows",
    "fetch the next rows": "starts their copy",
    "update": "the owners add up the gradients of all blocks, write their masters and send copies to all",
}


def rows_text(plan: RowsLayout) -> str:
    placement = f"one block of {plan.warps} warps: an exchange would cost more than it saves"
    if plan.blocks > 1:
        why = "each has the whole network and its part of the rows, so nothing is exchanged between layers"
        placement = f"a cluster of {plan.blocks} blocks of {plan.warps} warps: {why}"
    at_once = min(plan.rows, plan.warps // plan.team * ROW_TILE)
    workers = "warp" if plan.team == 1 else f"team of {plan.team} warps"
    rows = f"{plan.rows} per block and pass, {at_once} of them at once, a tile of {ROW_TILE} per {workers}"
    return describe(plan, placement=placement, rows=rows, ownership=partial(_ownership, plan), phase=PHASES.__getitem__)


def _ownership(plan: RowsLayout, layer: Layer) -> str:
    first, last = plan.first_slot(layer), plan.first_slot(layer) + plan.layer_slots(layer) - 1
    slots = f"slots {first} to {last}, of which block s % {plan.blocks} owns slot s"
    places = dict.fromkeys(plan.state_places[: plan.states])
    states = f", optimizer state in {' and '.join(places)}" if places else ""
    tiles = f"{layer.k_tiles * layer.n_tiles} tiles over {plan.warps} warps in {slots}"
    return f"{tiles}; masters in registers, a copy in every block's shared memory{states}"
