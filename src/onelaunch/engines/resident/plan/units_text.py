"""A plan by units in words."""

from __future__ import annotations

import re
from functools import partial

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.settings import N_TILE, ROW_TILE, WARPS
from onelaunch.engines.resident.plan.text import MEMORIES, describe
from onelaunch.engines.resident.plan.units_layout import UnitsLayout

PHASES = {
    "rows arrive": "waits for their copy",
    "fetch the next rows": "starts their copy",
    "sum the loss": "adds up the warps' parts of it",
}


def units_text(plan: UnitsLayout) -> str:
    rows = f"{plan.rows} per pass, {plan.row_tiles_at_once * ROW_TILE} of them multiplied at once"
    ownership, phase = partial(_ownership, plan), partial(_phase, plan)
    return describe(plan, placement=_placement(plan), rows=rows, ownership=ownership, phase=phase)


def _placement(plan: UnitsLayout) -> str:
    if plan.blocks == 1:
        why = "an exchange would cost more than it saves" if plan.hidden else "there is no hidden layer to divide"
        return f"one block of {WARPS} warps: {why}"
    if plan.cluster:
        why = "the network fits in it, and its blocks exchange in a third of a grid's time"
        return f"a cluster of {plan.blocks} blocks of {WARPS} warps: {why}"
    if not plan.chip.clusters:
        why = "this chip has no clusters"
    else:
        refusal = plan.refusal_in_a_cluster()
        why = f"in a cluster {refusal}" if refusal else "predicted faster than a cluster"
    return f"a grid of {plan.blocks} blocks of {WARPS} warps, all on the chip at once: {why}"


def _ownership(plan: UnitsLayout, layer: Layer) -> str:
    states = plan.states
    masters = f"masters in {MEMORIES[layer.masters_shared]} ({layer.weight_tiles * 4} floats per thread)"
    if states:
        kept = layer.register_states
        places = [*["registers"] * bool(kept), *["shared memory"] * (kept < states)]
        masters += f", optimizer state ({layer.weight_tiles * 4 * states}) in {' and '.join(places)}"
        masters += f", {layer.streamed_tiles * 4} of it in device memory" if layer.streamed_tiles else ""
    return f"{_owned(plan, layer)}; {masters}"


def _owned(plan: UnitsLayout, layer: Layer) -> str:
    if layer.last and plan.blocks == 1:
        return "all outputs"
    if layer.last:
        computes = "its part of every output" if plan.sums_outputs else "all outputs"
        inputs = layer.input_tiles * N_TILE
        return f"every block computes {computes} and owns the weights of its own {inputs} inputs"
    if plan.blocks == 1:
        return f"all {layer.units} units, padded to whole tiles of {N_TILE}"
    return f"block b owns units {layer.units}b to {layer.units}b + {layer.units - 1}"


def _phase(plan: UnitsLayout, name: str) -> str:
    found = re.fullmatch(r"(.*?)(?: (\d+))?", name)
    assert found is not None
    if found[2] is None:
        return PHASES[name]
    layer = plan.layers[int(found[2])]
    before = layer.index - 1
    values = "the rows" if layer.first else f"all values of layer {before}"
    match found[1]:
        case "forward":
            to = "to all" if plan.publishes(layer) else "for itself"
            if not plan.publishes(layer) and plan.outputs_at_once:
                to += ", and their partial outputs to the rows' owners"
            return f"reads {values} and its masters; writes slopes, and its units' values {to}"
        case "partial outputs":
            return "multiplies its own values by its own weights; sends a row's sums to the row's owner"
        case "loss":
            return f"adds up the outputs of its own rows (up to {plan.rows_per_block}); sends their gradient to all"
        case "wait for outputs":
            return "until the gradient of all rows has arrived"
        case "outputs":
            weights = "the weights of all" if layer.owned_by_input else "its masters"
            return f"reads {values} and {weights}; every block writes the loss and the outputs' deltas"
        case "back":
            deltas = "the outputs' deltas" if layer.last else f"all deltas of layer {layer.index}"
            to = "" if before == 0 else ", to itself and to all"
            return f"reads {deltas}, weights back and slopes {before}; writes its deltas of layer {before}{to}"
        case "update" | "late update":
            return _update(plan, layer, values, late=found[1] == "late update")
        case "wait for deltas" if plan.cluster:
            return "and for the weights that go with them"
    return "until all bytes have arrived" if plan.cluster else "until their writers' flags are up"


def _update(plan: UnitsLayout, layer: Layer, values: str, *, late: bool) -> str:
    before = layer.index - 1
    read = f"its own values of layer {before}" if layer.owned_by_input else values
    to = f"the owners of layer {before}"
    if layer.last:
        to = "itself" if plan.sums_outputs else "all"
    copies = "" if layer.first else f", and copies to {to}"
    return f"{'of the pass before: ' if late else ''}reads {read} and its deltas; writes its masters{copies}"
