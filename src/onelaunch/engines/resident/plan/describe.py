"""A plan in words: where it runs and why, who owns what, what lies where, who tells whom what, and what happens in a step.

`describe(plan)` is what `History.plan` shows of a resident run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.placement import predicted_microseconds
from onelaunch.engines.resident.plan.rows_plan import COPIES, PARTS, RowsPlan
from onelaunch.engines.resident.plan.settings import SCORE_BYTES, TILE, TILE_BYTES, WARPS
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.resident.source.source import phase_names
from onelaunch.engines.resident.source.units_source import received_bytes
from onelaunch.run.network import Dropout

PLACES = {True: "shared memory", False: "registers"}
# What the phases do that are the same for all layers.
PHASES = {
    "rows arrive": "waits for their copy",
    "fetch the next rows": "begins their copy",
    "sum the loss": "adds up what the warps have of it",
    "sum biases": "adds up the deltas of each unit; after the last pass of a step, sends the sums to all",
    "row tiles": "teams of warps take 16 rows each through all layers and back; write values and deltas",
    "meet": "the barrier of the block",
    "fetch rows to check": "begins their copy, in a pass that does not train",
    "gradient": "reads the block's values and deltas; a warp adds up the gradient of its tiles and sends it to their owners",
    "update": "the owners add up everyone's gradients, write their masters and send copies to all",
}


def describe(plan: Plan) -> str:
    parts = [_head(plan), _ownership(plan), _memory("shared memory of a block", plan.shared)]
    if plan.exchange.size:
        parts.append(_memory("global memory, kept in the L2 cache", plan.exchange))
    if plan.blocks > 1:
        parts.append(_exchanges(plan))
    parts.append(_phases(plan))
    return "\n".join("\n".join(part) for part in parts)


def _head(plan: Plan) -> Iterator[str]:
    settings, linears = plan.settings, [layer.stage.linear for layer in plan.layers]
    widths = "-".join(str(width) for width in [linears[0].inputs, *(linear.outputs for linear in linears)])
    yield f"resident: {widths}, batch {settings.batch}, {settings.precision}, {settings.optimizer}"
    planes = (
        f"a number is {plan.planes} bf16 numbers whose sum it is"
        if plan.planes > 1
        else f"products in {settings.precision}"
    )
    yield f"precision: {planes}; sums, masters and optimizer state are fp32"
    yield f"placement: {_placement(plan)}; predicted {predicted_microseconds(plan):.1f} µs a step"
    if isinstance(plan, RowsPlan):
        at_once = min(plan.rows, WARPS // plan.team * 16)
        by = "a warp" if plan.team == 1 else f"a team of {plan.team} warps"
        rows = f"rows: {plan.rows} a block and pass, {at_once} of them at once, a tile of 16 {by}"
    else:
        rows = f"rows: {plan.rows} a pass, {plan.group * 16} of them multiplied at once"
    if plan.micro_batches > 1:
        rows += f"; a batch takes {plan.micro_batches} passes, whose gradients are summed"
    buffers = (
        "fetched while the pass before computes"
        if plan.input_buffers == 2
        else "fetched after the pass before: no room for two"
    )
    yield f"{rows}; {buffers}"


def _placement(plan: Plan) -> str:
    """Where, and why there."""
    if isinstance(plan, RowsPlan) and plan.blocks > 1:
        why = "each has the whole network and its share of the rows, so nothing is exchanged between layers"
        return f"a cluster of {plan.blocks} blocks of {WARPS} warps: {why}"
    if plan.blocks == 1:
        why = "an exchange would cost more than it saves" if plan.hidden else "there is no hidden layer to share"
        return f"one block of {WARPS} warps: {why}"
    if plan.cluster:
        why = "the network fits in it, and blocks hand over in a third of a grid's time"
        return f"a cluster of {plan.blocks} blocks of {WARPS} warps: {why}"
    if not plan.chip.clusters:
        why = "this chip has no clusters"
    else:
        largest = Plan(plan.settings, plan.chip, plan.chip.largest_cluster, True, plan.rows, working=plan.working)
        why = f"in a cluster {largest.refusal}" if largest.refusal else "predicted faster than a cluster"
    return f"a grid of {plan.blocks} blocks of {WARPS} warps, all on the chip at once: {why}"


def _ownership(plan: Plan) -> Iterator[str]:
    for layer in plan.layers:
        linear = layer.stage.linear
        chain = [f"dropout {part.p}" if isinstance(part, Dropout) else part.name for part in layer.stage.chain]
        head = f"layer {layer.index}: linear {', '.join([f'{linear.inputs} -> {linear.outputs}', *chain])}"
        yield f"{head}: {_owned(plan, layer)}; {_held(plan, layer)}"


def _owned(plan: Plan, layer: Layer) -> str:
    if isinstance(plan, RowsPlan):
        first, last = plan.first_slot(layer), plan.first_slot(layer) + plan.layer_slots(layer) - 1
        slots = f"slots {first} to {last}, slot s is block s % {plan.blocks}'s"
        return f"{layer.steps * layer.tiles} tiles over {WARPS} warps in {slots}"
    if layer.last and plan.blocks == 1:
        return "all outputs"
    if layer.last:
        computes = "its share of every output" if plan.sums_outputs else "all outputs"
        return f"every block computes {computes} and owns the weights of its own {layer.input_tiles * TILE} inputs"
    if plan.blocks == 1:
        return f"all {layer.units} units, padded to whole tiles of {TILE}"
    return f"block b owns units {layer.units}b to {layer.units}b + {layer.units - 1}"


def _held(plan: Plan, layer: Layer) -> str:
    if isinstance(plan, RowsPlan):
        states = f", optimizer state in {PLACES[plan.states_shared]}" if plan.states else ""
        return f"masters in registers, a copy in every block's shared memory{states}"
    masters = f"masters in {PLACES[layer.masters_shared]} ({layer.weight_tiles * 4} floats a thread)"
    if not plan.states:
        return masters
    return f"{masters}, optimizer state ({layer.weight_tiles * 4 * plan.states}) in {PLACES[layer.states_shared]}"


def _memory(title: str, memory: Memory) -> Iterator[str]:
    yield f"{title}: {memory.size:,} bytes"
    for region in memory.regions.values():
        yield f"  {region.offset:>9,}  {region.bytes:>9,}  {region.name}"


def exchanged_bytes(plan: Plan) -> dict[int, int]:
    """What block 0 receives in each exchange, by the exchange's number; no other receives more."""
    if isinstance(plan, RowsPlan):
        tiles = -(-plan.slots // plan.blocks) * WARPS * plan.blocks * TILE_BYTES
        parts = tiles + plan.blocks * (plan.all_units * 4 * plan.has_biases + plan.row_tiles * SCORE_BYTES)
        return {PARTS: parts, COPIES: plan.copies_total, plan.decision: 4}
    return {**received_bytes(plan, 0), plan.decision: 4}


def _exchanges(plan: Plan) -> Iterator[str]:
    way = (
        "st.async into every block's shared memory, counted by its barriers"
        if plan.cluster
        else "global memory, a flag a writer"
    )
    sizes, names = exchanged_bytes(plan), plan.exchange_names()
    yield f"exchanges, by {way}; bytes a block receives:"
    for number in sorted(sizes):
        yield f"  {sizes[number]:>9,}  {names[number]}"


def _phases(plan: Plan) -> Iterator[str]:
    yield "a pass:"
    names = phase_names(plan)
    for number, name in enumerate(names, 1):
        alone = plan.blocks == 1 and name.startswith("wait")
        yield f"  {number:>2}. {name}: {'the barrier of the block' if alone else _what(plan, name)}"


def _what(plan: Plan, name: str) -> str:
    """What a phase reads and writes."""
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
            return f"adds up the outputs of its own rows (up to {plan.rows_each}); sends their gradient to all"
        case "wait for outputs":
            return "until the gradient of all rows is here"
        case "outputs":
            weights = "the weights of all" if layer.owned_by_input else "its masters"
            return f"reads {values} and {weights}; every block writes the loss and the outputs' deltas"
        case "back":
            deltas = "the outputs' deltas" if layer.last else f"all deltas of layer {layer.index}"
            to = "" if before == 0 else ", to itself and to all"
            return f"reads {deltas}, weights back and slopes {before}; writes its deltas of layer {before}{to}"
        case "update" | "late update":
            read = f"its own values of layer {before}" if layer.owned_by_input else values
            to = (
                "itself"
                if layer.last and plan.sums_outputs
                else "all"
                if layer.last
                else f"the owners of layer {before}"
            )
            when = "of the pass before: " if found[1] == "late update" else ""
            return (
                f"{when}reads {read} and its deltas; writes its masters{'' if layer.first else f', and copies to {to}'}"
            )
        case "wait for deltas" if plan.cluster:
            return "and for the weights that go with them"
    return "until all bytes are here" if plan.cluster else "until their writers' flags are up"
