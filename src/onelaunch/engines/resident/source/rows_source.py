"""The source of a plan by rows: each block has the whole network and a share of the rows (`cuda/rows.cuh`)."""

from __future__ import annotations

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.rows_plan import COPIES, PARTS, RowsPlan
from onelaunch.engines.resident.source.source_common import Phases, constants, layer_struct, phases_macro


def rows_source(plan: RowsPlan, *, faults: bool, stamps: bool) -> str:
    names, shared = [name for name, _ in rows_phases(plan)], plan.shared
    own = {
        "BY_ROWS": 1, "SUMS_OUTPUTS": 0,
        "SHARES": plan.blocks, "LAYERS": len(plan.layers), "GROUP_TILES": 1, "FINISH": 1, "LOSS_WARPS": 8,
        "PARTIALS_BYTES": 0, "PARTIAL_BUFFERS": 1, "AT_PARTIALS": 0, "AT_STAGING": 0, "PARTS": PARTS, "COPIES": COPIES,
        "TEAM": plan.team, "SLOTS_ALL": plan.slots, "UNITS_ALL": plan.all_units, "AT_BIAS": shared["bias"],
        "AT_BIAS_SUMS": shared["bias sums"], "AT_BIAS_TOTALS": shared["bias totals"], "AT_SCORES": shared["scores"],
        "AT_PARTS": shared["parts"], "AT_BIAS_PARTS": shared["bias parts"], "AT_STATES": shared["states"],
        "STATES_SHARED": int(plan.states_shared), "HAS_BIASES": int(plan.has_biases),
    }  # fmt: skip
    exchanged = {PARTS: plan.received_parts("rank"), COPIES: str(plan.copies_total)}
    parts = [
        constants(plan, rows_phases(plan), own=own, exchanged=exchanged, faults=faults, stamps=stamps),
        '#include "activations.cuh"',
        '#include "random.cuh"',
        *(_layer(plan, layer) for layer in plan.layers),
        _each_layer(plan),
        phases_macro("FORWARD_PHASES", _forward(plan), names),
        phases_macro("BACKWARD_PHASES", _backward(plan), names),
        "#define DECLARE_WEIGHTS OwnWeights w;",
        "#define LOAD_WEIGHTS move_weights<true>(c, w);",
        "#define HAND_OUT_WEIGHTS copy_all(c, w, 0); wait_for<COPIES>(c, 0, 0, 1);",
        "#define LATE_UPDATE",
        "#define SAVE_WEIGHTS move_weights<false>(c, w);",
        '#include "kernel.cuh"',
        "",
    ]
    return "\n".join(parts)


def rows_phases(plan: RowsPlan) -> Phases:
    return [*_forward(plan), *_backward(plan)]


def _layer(plan: RowsPlan, layer: Layer) -> str:
    name, shared = f"layer {layer.index}: ", plan.shared
    numbers = {
        "UNIT_AT": plan.unit_at(layer), "SLOTS": plan.layer_slots(layer), "FIRST_SLOT": plan.first_slot(layer),
        "AT_COPIES": shared[name + "weights"], "AT_DELTA": shared[name + "deltas"],
        "AT_VALUES": 0 if layer.last else shared[name + "values"], "EACH": plan.tiles_each(layer),
        "AT_ONCE": plan.tiles_at_once(layer),
    }  # fmt: skip
    return layer_struct(plan, layer, numbers, {"SLOPES_SHARED": plan.slopes_shared(layer)})


def _each_layer(plan: RowsPlan) -> str:
    """`EACH_LAYER(…)` does something with every layer as L; `has_bias` knows the units that have one."""
    bodies = " ".join(f"{{ using L = Layer{layer.index}; __VA_ARGS__ }}" for layer in plan.layers)
    units = " || ".join(
        f"(unit >= {plan.unit_at(layer)} && unit < {plan.unit_at(layer) + layer.stage.linear.outputs})"
        for layer in plan.layers
        if layer.stage.linear.bias
    )
    has_bias = f"INLINE bool has_bias(u32 unit) {{ return {units or 'false'}; }}"
    return f"#define EACH_LAYER(...) {bodies}\n{has_bias}"


def _forward(plan: RowsPlan) -> Phases:
    """A team's row tile through the network and, when training, back. Weights are read before a barrier: no wait after it."""
    hidden, last = plan.layers[:-1], plan.layers[-1].index
    read = "[&](int step, int plane, u32 (&left)[4]) {{ {} }}"
    source = read.format("Inputs<Layer0>::read_step(c, buffer(), m, step, plane, left);")
    weights = [f"ForwardWeights<Layer{layer.index}> w{layer.index};" for layer in hidden]
    lines = [" ".join([*weights, f"OutwardWeights<Layer{last}> w{last};"]), "w0.prepare(c);"]
    for layer in hidden:
        i = layer.index
        place = plan.shared[f"layer {i}: slopes"] if plan.slopes_shared(layer) else 0
        lines.append(f"Slopes<Layer{i}> slopes{i}; slopes{i}.place(c, {place});")
        lines.append(
            f"tile_forward<Layer{i}>(c, draw, m, w{i}, slopes{i}, {source}); w{i + 1}.prepare(c); meet_team(c);"
        )
        source = read.format(f"read_values<Layer{i}>(c, m, step, plane, left);")
    lines.append(f"u32 out[PLANES][Layer{last}::NT / 2][4];")
    lines.append(f"tile_outputs<Layer{last}>(c, draw, tally, m, w{last}, score, out, {source});")
    back = []
    source = read.format(" ".join(f"left[{word}] = out[plane][step][{word}];" for word in range(4)))
    for i in range(last, 0, -1):
        back.append(
            f"BackwardWeights<Layer{i}, Layer{i - 1}> b{i}; b{i}.prepare(c);{'' if i == last else ' meet_team(c);'}"
        )
        back.append(f"tile_backward<Layer{i}, Layer{i - 1}>(c, m, b{i}, slopes{i - 1}, {source});")
        source = read.format(f"read_deltas<Layer{i - 1}>(c, m, step, plane, left);")
    lines.append(f"if (draw.training) {{ {' '.join(back)} }}")
    fetch = [("fetch rows to check", "if (!draw.training) fetch_next();")] if plan.input_buffers == 2 else []
    body = " \\\n    ".join(lines)
    tiles = f"for (int m = c.warp / TEAM; m < ROW_TILES; m += WARPS / TEAM) {{ {body} }}"
    return [
        ("rows arrive", "Inputs<Layer0>::arrive(c, buffer());"),
        *fetch,
        ("row tiles", tiles),
        ("meet", "c.dead = __syncthreads_or(c.dead);"),
    ]


def _backward(plan: RowsPlan) -> Phases:
    sums = []
    for layer in plan.layers:
        i = layer.index
        read = f"read_values_transposed<Layer{i - 1}>(c, m, step, plane, left);"
        if layer.first:
            read = "Inputs<Layer0>::read_step_transposed(c, buffer(), m, step, plane, left);"
        sums.append(
            f"add_gradient<Layer{i}>(c, gradient, [&](int m, int step, int plane, u32 (&left)[4]) {{ {read} }}); "
            f"if (last) send_parts<Layer{i}>(c, gradient);"
        )
    clear = "if (micro == 0) for (int i = 0; i < SLOTS_ALL; ++i) clear(gradient[i]);"
    fetch = "fetch_next();" if plan.input_buffers == 2 else "__syncthreads(); fetch_next();"
    return [
        ("sum biases", "sum_biases(c, micro == 0, last);"),
        ("gradient", f"{clear} {' '.join(sums)}"),
        ("fetch the next rows", fetch),  # while the parts are on their way
        ("update", "if (last) { send_score(c, score); finish_step(c, w, gradient, rates, rule, total); }"),
    ]
