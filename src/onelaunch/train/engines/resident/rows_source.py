"""The source of a plan by rows: each block has the whole network and a share of the rows (`cuda/rows.cuh`)."""

from __future__ import annotations

from onelaunch.train.engines.resident.emit import Phases, constants, layer_struct, phases_macro
from onelaunch.train.engines.resident.plan import Layer
from onelaunch.train.engines.resident.rows_plan import COPIES, PARTS, RowsPlan


def rows_source(plan: RowsPlan, *, faults: bool, stamps: bool) -> str:
    names, shared = [name for name, _ in rows_phases(plan)], plan.shared
    own = {
        "BY_ROWS": 1, "SHARES": plan.blocks, "LAYERS": len(plan.layers), "GROUP_TILES": 1, "FINISH": 1, "LOSS_WARPS": 8,
        "PARTIALS_BYTES": 0, "PARTIAL_BUFFERS": 1, "AT_PARTIALS": 0, "AT_STAGING": 0, "PARTS": PARTS, "COPIES": COPIES,
        "CHUNK": plan.chunk, "SLOTS_ALL": plan.slots, "UNITS_ALL": plan.all_units, "AT_BIAS": shared["bias"],
        "AT_BIAS_SUMS": shared["bias sums"], "AT_BIAS_TOTALS": shared["bias totals"], "AT_RIGHT": shared["right"],
        "AT_PARTS": shared["parts"], "AT_BIAS_PARTS": shared["bias parts"], "AT_STATES": shared["states"],
        "STATES_SHARED": int(plan.states_shared),
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
        "AT_VALUES": 0 if layer.last else shared[name + "values"], "AT_SLOPE": 0 if layer.last else shared[name + "slopes"],
    }  # fmt: skip
    return layer_struct(plan, layer, numbers, {})


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
    """A warp's row tiles through the network and, when training, back."""
    lines = [f"u32 v{layer.index}[PLANES][Layer{layer.index}::NT / 2][4];" for layer in plan.layers[:-1]]
    read = "[&](int step, int plane, u32 (&left)[4]) {{ {} }}"
    source = read.format("Inputs<Layer0>::read_step(c, buffer, m, step, plane, left);")
    for layer in plan.layers[:-1]:
        i = layer.index
        lines.append(f"tile_forward<Layer{i}>(c, draw, m, v{i}, {source});")
        source = read.format(" ".join(f"left[{word}] = v{i}[plane][step][{word}];" for word in range(4)))
    last = len(plan.layers) - 1
    lines.append(f"u32 d{last}[PLANES][Layer{last}::NT / 2][4];")
    lines.append(f"tile_outputs<Layer{last}>(c, draw, tally, m, score, d{last}, {source});")
    back = []
    for i in range(last, 0, -1):
        back.append(f"u32 d{i - 1}[PLANES][Layer{i - 1}::NT / 2][4];")
        back.append(f"tile_backward<Layer{i}, Layer{i - 1}>(c, m, d{i}, d{i - 1});")
    lines.append(f"if (draw.training) {{ {' '.join(back)} }}")
    body = " \\\n    ".join(lines)
    tiles = f"Score score = {{0.f, 0}}; for (int m = c.warp; m < ROW_TILES; m += WARPS) {{ {body} }} add_score(c, draw, score);"
    return [
        ("rows arrive", "Inputs<Layer0>::arrive();"),
        ("fetch the next rows", "next_inputs();"),
        ("row tiles", f"{{ {tiles} }}"),
        ("meet", "c.dead = __syncthreads_or(c.dead);"),
    ]


def _backward(plan: RowsPlan) -> Phases:
    sums = []
    for layer in plan.layers:
        i = layer.index
        read = f"read_values_transposed<Layer{i - 1}>(c, m, step, plane, left);"
        if layer.first:
            read = "Inputs<Layer0>::read_step_transposed(c, buffer, m, step, plane, left);"
        sums.append(
            f"add_gradient<Layer{i}>(c, gradient, [&](int m, int step, int plane, u32 (&left)[4]) {{ {read} }});"
        )
    clear = "if (micro == 0) for (int i = 0; i < SLOTS_ALL; ++i) clear(gradient[i]);"
    fetch = [] if plan.input_buffers == 2 else [("fetch the next rows", "__syncthreads(); fetch_next();")]
    return [
        ("gradient", f"{clear} {' '.join(sums)}"),
        (
            "sum the loss",
            "total_biases(c, micro == 0); if (threadIdx.x == 0) total += sum_of_losses(c); __syncthreads();",
        ),
        *fetch,
        ("update", "if (last) finish_step(c, w, gradient, rates, rule, total);"),
    ]
