"""The source of a plan by rows: each block has the whole network and a part of the rows (`cuda/rows.cuh`)."""

from __future__ import annotations

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.plan import Phases
from onelaunch.engines.resident.plan.rows_layout import COPIES, PARTS, RowsLayout
from onelaunch.engines.resident.plan.settings import SCORE_BYTES, TILE_BYTES
from onelaunch.engines.resident.source.source_common import MEMORIES, layer_struct, source_text


def rows_source(plan: RowsLayout, *, faults: bool, stamps: bool) -> str:
    shared = plan.shared
    own = {
        "BY_ROWS": 1, "SUMS_OUTPUTS": 0, "ROW_PARTITIONS": plan.blocks, "ROW_TILES_AT_ONCE": 1, "ROW_BLOCKS_PER_WARP": 1,
        "LOSS_WARPS": plan.warps, "PARTIALS_BYTES": 0, "PARTIAL_BUFFERS": 1, "AT_PARTIALS": 0, "AT_STAGING": 0,
        "PARTS": PARTS, "COPIES": COPIES, "TEAM": plan.team, "ALL_SLOTS": plan.slots, "ALL_UNITS": plan.all_units,
        "AT_BIAS": shared["bias"], "AT_BIAS_SUMS": shared["bias sums"], "AT_BIAS_TOTALS": shared["bias totals"],
        "AT_SCORES": shared["scores"], "AT_PARTS": shared["parts"] if plan.blocks > 1 else 0,
        "AT_BIAS_PARTS": shared["bias parts"] if plan.blocks > 1 else 0, "TILES_AT_ONCE": plan.tiles_at_once,
        "FREE_REGISTERS": plan.free_registers,
        "HAS_BIASES": int(plan.has_biases),
    }  # fmt: skip
    for number, place in enumerate(plan.state_places):
        memory = {"shared memory": shared, "device memory": plan.exchange}.get(place)
        own[f"STATE{number}_MEMORY"] = MEMORIES.index(place)
        own[f"AT_STATE{number}"] = 0 if memory is None or number >= plan.states else memory[f"state {number}"]
    weights = {
        "DECLARE_WEIGHTS": "OwnWeights w;",
        "LOAD_WEIGHTS": "move_weights<true>(c, w);",
        "SEND_WEIGHTS": "copy_all(c, w, 0); wait_for<COPIES>(c, 0, 0, 1);",
        "LATE_UPDATE": "",
        "AWAIT_LAST_SENDS": "",  # a step ends when all new copies have arrived
        "SAVE_WEIGHTS": "move_weights<false>(c, w);",
    }
    return source_text(
        plan, own=own, exchanged={PARTS: _received_parts(plan), COPIES: str(plan.copies_bytes)},
        layers=[*(_layer(plan, layer) for layer in plan.layers), _each_layer(plan)], forward=_forward(plan),
        backward=_backward(plan), weights=weights, faults=faults, stamps=stamps,
    )  # fmt: skip


def _received_parts(plan: RowsLayout) -> str:
    """Bytes of partial sums that block `rank` receives, as an expression."""
    blocks = plan.blocks
    tiles = f"({plan.slots} - rank + {blocks - 1}) / {blocks} * {plan.warps * blocks * TILE_BYTES}"
    biases = blocks * plan.all_units * 4 * plan.has_biases
    return f"{tiles} + {biases} + (rank == 0) * {blocks * plan.row_tiles * SCORE_BYTES}"


def rows_phases(plan: RowsLayout) -> Phases:
    return [*_forward(plan), *_backward(plan)]


def _layer(plan: RowsLayout, layer: Layer) -> str:
    name, shared = f"layer {layer.index}: ", plan.shared
    numbers = {
        "UNIT_AT": plan.unit_at(layer), "SLOTS": plan.layer_slots(layer), "FIRST_SLOT": plan.first_slot(layer),
        "AT_COPIES": shared[name + "weights"], "AT_DELTA": shared[name + "deltas"],
        "AT_VALUES": 0 if layer.last else shared[name + "values"], "N_TILES_PER_WARP": plan.n_tiles_per_warp(layer),
        "N_TILES_AT_ONCE": plan.n_tiles_at_once(layer),
    }  # fmt: skip
    flags = {
        "SLOPES_SHARED": plan.slopes_shared(layer), "SLOPES_OF_VALUES": plan.slopes_of_values(layer) and not layer.last
    }  # fmt: skip
    return layer_struct(plan, layer, numbers, flags)


def _each_layer(plan: RowsLayout) -> str:
    """The macro `EACH_LAYER(…)`, which repeats its argument with every layer as L, and `has_bias(unit)`."""
    bodies = " ".join(f"{{ using L = Layer{layer.index}; __VA_ARGS__ }}" for layer in plan.layers)
    units = " || ".join(
        f"(unit >= {plan.unit_at(layer)} && unit < {plan.unit_at(layer) + layer.stage.linear.outputs})"
        for layer in plan.layers
        if layer.stage.linear.bias
    )
    has_bias = f"INLINE bool has_bias(u32 unit) {{ return {units or 'false'}; }}"
    return f"#define EACH_LAYER(...) {bodies}\n{has_bias}"


def _forward(plan: RowsLayout) -> Phases:
    """A team takes its row tile through the network and, when training, back. It reads weights before a barrier, not after."""
    hidden, last = plan.layers[:-1], plan.layers[-1].index
    read = "[&](int k_tile, int plane, u32 (&left)[4]) {{ {} }}"
    source = read.format("Inputs<Layer0>::read_k_tile(c, buffer(), m, k_tile, plane, left);")
    weights = [f"ForwardWeights<Layer{layer.index}> w{layer.index};" for layer in hidden]
    lines = [" ".join([*weights, f"OutwardWeights<Layer{last}> w{last};"]), "w0.prepare(c);"]
    for layer in hidden:
        i = layer.index
        region = f"layer {i}: slopes"
        place = plan.shared[region] if region in plan.shared.regions else 0
        lines.append(f"Slopes<Layer{i}> slopes{i}; slopes{i}.place(c, {place});")
        lines.append(
            f"tile_forward<Layer{i}>(c, draw, m, w{i}, slopes{i}, {source}); w{i + 1}.prepare(c); sync_team(c);"
        )
        source = read.format(f"read_values<Layer{i}>(c, m, k_tile, plane, left);")
    lines.append(f"u32 out[PLANES][Layer{last}::N_TILES / 2][4];")
    lines.append(f"tile_outputs<Layer{last}>(c, draw, tally, m, w{last}, score, out, {source});")
    back = []
    source = read.format(" ".join(f"left[{word}] = out[plane][k_tile][{word}];" for word in range(4)))
    for i in range(last, 0, -1):
        back.append(
            f"BackwardWeights<Layer{i}, Layer{i - 1}> b{i}; b{i}.prepare(c);{'' if i == last else ' sync_team(c);'}"
        )
        back.append(f"tile_backward<Layer{i}, Layer{i - 1}>(c, draw, m, b{i}, slopes{i - 1}, {source});")
        source = read.format(f"read_deltas<Layer{i - 1}>(c, m, k_tile, plane, left);")
    lines.append(f"if (draw.training) {{ {' '.join(back)} }}")
    fetch = [("fetch validation rows", "if (!draw.training) fetch_next();")] if plan.input_buffers == 2 else []
    body = " \\\n    ".join(lines)
    tiles = f"for (int m = c.warp / TEAM; m < ROW_TILES; m += WARPS / TEAM) {{ {body} }}"
    if plan.updates_at_once:
        tiles += " if (draw.training) send_score(c, score);"
    return [
        ("rows arrive", "Inputs<Layer0>::arrive(c, buffer());"),
        *fetch,
        ("row tiles", tiles),
        ("meet", "c.dead = __syncthreads_or(c.dead);"),
    ]


def _backward(plan: RowsLayout) -> Phases:
    if plan.updates_at_once:
        return _update_at_once(plan)
    sums = []
    for layer in plan.layers:
        i = layer.index
        sums.append(
            f"add_gradient<Layer{i}>(c, gradient, {_read_transposed(layer)}); if (last) send_parts<Layer{i}>(c, gradient);"
        )
    clear = "if (micro == 0) for (int i = 0; i < ALL_SLOTS; ++i) clear(gradient[i]);"
    fetch = "fetch_next();" if plan.input_buffers == 2 else "__syncthreads(); fetch_next();"
    return [
        ("sum biases", "sum_biases(c, micro == 0, last);"),
        ("gradient", f"{clear} {' '.join(sums)}"),
        ("fetch the next rows", fetch),  # while the parts are in flight
        ("update", "if (last) { send_score(c, score); finish_step(c, w, gradient, rates, rule, total); }"),
    ]


def _read_transposed(layer: Layer) -> str:
    """How a warp reads the inputs of a layer as the left operand whose k are the rows."""
    read = f"read_values_transposed<Layer{layer.index - 1}>(c, m, k_tile, plane, left);"
    if layer.first:
        read = "Inputs<Layer0>::read_k_tile_transposed(c, buffer(), m, k_tile, plane, left);"
    return f"[&](int m, int k_tile, int plane, u32 (&left)[4]) {{ {read} }}"


def _update_at_once(plan: RowsLayout) -> Phases:
    """One block, one pass per step: the barrier with which the next rows arrive also ends the update."""
    updates = [
        f"update_layer<Layer{layer.index}>(c, w, rates, rule, {_read_transposed(layer)});" for layer in plan.layers
    ]
    others = f"{' '.join(updates[1:])} update_biases(c, rates, rule); if (threadIdx.x == 0) total = add_scores(c);"
    if plan.input_buffers == 2:
        return [("fetch the next rows", "fetch_next();"), ("gradient and update", f"{updates[0]} {others}")]
    # Only the first layer's gradient reads the rows, so the others hide the fetch.
    fetch = ("fetch the next rows", "__syncthreads(); fetch_next();")
    return [("first gradient and update", updates[0]), fetch, ("gradient and update", others)]
