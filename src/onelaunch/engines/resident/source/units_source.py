"""The source of a plan by units: each block owns units of every layer, and the blocks exchange values and deltas."""

from __future__ import annotations

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.plan import Phases
from onelaunch.engines.resident.plan.settings import WARPS
from onelaunch.engines.resident.plan.units_layout import UnitsLayout
from onelaunch.engines.resident.source.source_common import MEMORIES, layer_struct, source_text


def units_source(plan: UnitsLayout, *, faults: bool, stamps: bool) -> str:
    own = {
        "BY_ROWS": 0, "SUMS_OUTPUTS": int(plan.sums_outputs), "ROW_PARTITIONS": 1,
        "ROW_TILES_AT_ONCE": plan.row_tiles_at_once, "ROW_BLOCKS_PER_WARP": plan.row_blocks_per_warp,
        "LOSS_WARPS": min(WARPS, 2 * plan.row_tiles_at_once), "ROWS_PER_BLOCK": plan.rows_per_block,
        "SCORE_WARPS": plan.score_warps, "PARTIALS_BYTES": plan.partials_bytes, "PARTIAL_BUFFERS": plan.partial_buffers,
        "AT_PARTIALS": plan.shared["partial sums" if plan.partial_buffers else "staging"],
        "AT_STAGING": plan.shared["staging"] if "staging" in plan.shared.regions else 0,
    }  # fmt: skip
    received = [plan.received_bytes(rank) for rank in range(plan.blocks)]
    return source_text(
        plan, own=own, exchanged={number: _by_rank([sizes[number] for sizes in received]) for number in received[0]},
        layers=[_layer(plan, layer) for layer in plan.layers], forward=_forward(plan), backward=_backward(plan),
        weights=_weights(plan), faults=faults, stamps=stamps,
    )  # fmt: skip


def _by_rank(values: list[int]) -> str:
    """An expression in `rank`, valid in C and in Python, that has these values."""
    changes = [(i, values[i - 1] - values[i]) for i in range(1, len(values)) if values[i - 1] != values[i]]
    return " + ".join([str(values[-1]), *(f"(rank < {i}) * {change}" for i, change in changes)])


def units_phases(plan: UnitsLayout) -> Phases:
    return [*_forward(plan), *_backward(plan)]


def _layer(plan: UnitsLayout, layer: Layer) -> str:
    name = f"layer {layer.index}: "

    def at(what: str) -> int:
        for memory in (plan.shared, plan.exchange):
            if name + what in memory.regions:
                return memory[name + what]
        return 0

    numbers = {
        "K_TILES_PER_WARP": layer.k_tiles_per_warp, "UNITS": layer.units, "SPLIT_K": layer.split_k,
        "NEXT_K_TILES": layer.next_k_tiles, "IN_TILES": layer.input_tiles, "AT_MASTERS": at("masters"),
        "AT_GRADIENTS": at("gradients"), "AT_BIAS": at("bias"), "AT_BIAS_SUMS": at("bias sums"),
        "AT_DELTA": at("deltas"), "AT_SLOPE": at("slopes"), "AT_OUT": at("values of all"),
        "AT_ALL_DELTAS": at("deltas of all"), "AT_BACK": at("weights back"),
        "OUT_STRIDE": (plan.out_buffers(layer) - 1) * plan.out_bytes(layer),
        "BACK_BYTES": plan.back_bytes(layer), "OUT_EXCHANGE": plan.values_exchange(layer),
        "DELTA_EXCHANGE": 0 if layer.first else plan.deltas_exchange(layer),
        "BACK_EXCHANGE": 0 if layer.first else plan.back_exchange(layer), "LAST_EXCHANGE": plan.last_exchange,
        "AT_OWN": at("own values"), "AT_COPIES": at("weights of all"), "AT_PARTS": at("partial outputs"),
        "COPIES_BYTES": plan.copies_bytes(),
    }  # fmt: skip
    for number in range(2):
        region = f"{name}state {number}"
        memory = "registers" if number < layer.register_states or number >= plan.states else "shared memory"
        numbers[f"STATE{number}_MEMORY"] = MEMORIES.index(memory)
        numbers[f"STATE{number}_STREAMED"] = layer.streamed_of(number, plan.states) if number < plan.states else 0
        for prefix, where in (("AT_STATE", plan.shared), ("AT_STREAMED", plan.exchange)):
            numbers[f"{prefix}{number}"] = where[region] if region in where.regions else 0
    flags = {
        "REPLICATED": layer.last, "MASTERS_SHARED": layer.masters_shared, "KEEPS_VALUES": plan.keeps_values(layer)
    }  # fmt: skip
    return layer_struct(plan, layer, numbers, flags)


def _read(layer: Layer, transposed: str = "", passes: str = "c.passes") -> str:
    """How a warp reads its inputs of a layer: from the fetched rows, or from the layer before in pass `passes`."""
    head = "[&](int m, int k, int plane, u32 (&left)[4]) {"
    if layer.first:
        return f"{head} Inputs<Layer0>::read{transposed}(c, buffer(), m, k, plane, left); }}"
    before = f"Layer{layer.index - 1}"
    return (
        f"{head} read_left{transposed}<{before}::AT_OUT, {before}::OUT_STRIDE, {before}::NEXT_K_TILES>"
        f"(c, {passes}, plane * ROW_TILES + m, k, left); }}"
    )


def _forward(plan: UnitsLayout) -> Phases:
    """The phases of a forward pass, including the loss."""
    lines = [("rows arrive", "Inputs<Layer0>::arrive(c, buffer());")]
    fetch = [("fetch the next rows", "fetch_next();")] if plan.input_buffers == 2 else []
    for layer in plan.layers:
        name, index = f"Layer{layer.index}", layer.index
        if not layer.first:
            before = f"Layer{index - 1}"
            if layer.last and plan.sums_outputs:
                return lines + _summed_outputs(name, before, index, fetch, plan.outputs_at_once)
            if index == 1 and plan.late_update:
                lines.append(("late update 1", _late_update(plan)))
            elif fetch and not (index == 1 and plan.multicasts_rows):
                lines.append(fetch.pop())
            wait = "" if layer.last else f"Operands<{name}> o{index}; o{index}.prepare(w{index}); "
            wait += f"wait_for<{before}::OUT_EXCHANGE>(c, c.passes, {before}::NEXT_K_TILES, {before}::N_TILES);"
            if not plan.cluster and plan.blocks > 1:
                wait += f" stage<{before}::AT_OUT, {before}::OUT_STRIDE, {before}::NEXT_K_TILES>(c, c.passes);"
                wait += " wait_for_staging();"
            lines.append((f"wait for values {index - 1}", wait))
        if layer.last:
            sums = f"multiply<{name}>(c, w{index}, Operands<{name}>(), group, sum, {_read(layer)});"
            if layer.owned_by_input:
                sums = f"multiply_copies<{name}>(c, c.step + trained, group, sum, {_read(layer)});"
            product = f"[&](int group, float (&sum)[ROW_TILES_AT_ONCE][{name}::N_TILES][4]) {{ {sums} }}"
            lines.append((f"outputs {index}", f"outputs<{name}>(c, draw, tally, {product});"))
        else:
            operands, give = "Operands<Layer0>()" if layer.first else f"o{index}", f"ToAll<{name}>{{c}}"
            if not plan.publishes(layer):
                give = f"ToOwners<Layer{index + 1}, {name}>(c)" if plan.outputs_at_once else "ToNobody()"
            call = f"forward<{name}>(c, w{index}, {operands}, draw, {_read(layer)}, {give});"
            lines.append((f"forward {index}", call))
    return lines + fetch


def _summed_outputs(name: str, before: str, index: int, fetch: Phases, at_once: bool) -> Phases:
    """The last layer where blocks sum the outputs.

    `fetch`: the fetch of the next rows, if it is still to be done while they wait. `at_once`: the partial outputs were sent
    together with the values.
    """
    wait = f"wait_for<{name}::LAST_EXCHANGE>(c, c.passes, 0, 1); c.dead = __syncthreads_or(c.dead);"
    awaited = f"OutputBias<{name}> b{index}(c); wait_for<{before}::OUT_EXCHANGE>(c, c.passes, 0, 1);"
    sends = [] if at_once else [(f"partial outputs {index}", f"send_partial_outputs<{name}, {before}>(c);")]
    return [
        *sends,
        *fetch,
        (f"wait for partial outputs {index}", awaited),
        (f"loss {index}", f"finish_outputs<{name}, {before}>(c, draw, tally, b{index});"),
        (f"wait for outputs {index}", wait),
    ]


def _late_update(plan: UnitsLayout) -> str:
    """The second layer's update, made while the next pass waits for the first layer's values; empty where it is not late."""
    if not plan.late_update:
        return ""
    read = _read(plan.layers[1], "_transposed", "c.passes - 1")
    return (
        f"if (late) {{ late = false; update<Layer1>(c, w1, late_rates, rule, true, true, c.step + trained, {read}); }}"
    )


def _backward(plan: UnitsLayout) -> Phases:
    lines, sum_the_loss = [], "if (c.warp == 0) total += sum_of_losses(c);"
    for layer in reversed(plan.layers):
        name, before, index = f"Layer{layer.index}", f"Layer{layer.index - 1}", layer.index
        if not layer.first and layer.last:
            sums = f"sum_output_deltas<{name}>(c); " if plan.sums_outputs else ""
            lines.append((f"back {index}", f"{sums}back_from_outputs<{name}, {before}>(c);"))
        elif not layer.first:
            waits = f"wait_for<{name}::DELTA_EXCHANGE>(c, c.backs, {name}::NEXT_K_TILES, {name}::N_TILES); "
            waits += f"wait_for_weights<{name}>(c, micro == 0);"
            lines += [(f"wait for deltas {index}", waits), (f"back {index}", f"back<{name}, {before}>(c);")]
        if index == 1 and plan.late_update:
            continue
        read = _read(layer, "_transposed")
        update = f"update<{name}>(c, w{index}, rates, rule, micro == 0, last, c.step + 1, {read});"
        if not plan.cluster and plan.blocks > 1 and not layer.first and not layer.last:
            later = int(layer.index == 1 and plan.input_buffers == 1)  # the copy of the next rows is in flight too
            update = f"wait_for_staging<{later}>(); {update}"
        if layer.owned_by_input:
            update = f"update_last<{name}, {before}>(c, w{index}, rates, rule, micro == 0, last);"
        lines.append((f"update {index}", update))
        if layer.last and plan.sums_outputs:  # while the other blocks' deltas are in flight
            lines.append(("sum the loss", sum_the_loss))
    if plan.input_buffers == 1:  # the first layer's update comes first: the others hide the fetch
        first, back = lines.pop(), [name for name, _ in lines].index("back 1") if len(plan.layers) > 1 else -1
        lines[back + 1 : back + 1] = [first, ("fetch the next rows", "__syncthreads(); fetch_next();")]
    if not plan.sums_outputs:
        meet = "__syncthreads(); " if len(plan.layers) == 1 else ""  # otherwise a phase since the outputs has a barrier
        lines.append(("sum the loss", meet + sum_the_loss))
    return lines


def _weights(plan: UnitsLayout) -> dict[str, str]:
    """Macros that declare, load, send (to those that need copies) and save the weights of every layer."""
    last = len(plan.layers) - 1
    types = [f"Weights<Layer{i}>" for i in range(last)]
    types.append(f"LastWeights<Layer{last}, Layer{last - 1}>" if last else "Weights<Layer0>")
    sent = [f"send_all_back<Layer{i}>(c, w{i}, 0);" for i in range(1, last)]
    sent += [f"send_all_copies<Layer{last}, Layer{last - 1}>(c, w{last}, 0);"] if last else []
    drains = [f"wait_for<Layer{i}::BACK_EXCHANGE>(c, c.step, 0, 1);" for i in range(1, last) if plan.cluster]
    return {
        "AWAIT_LAST_SENDS": " ".join(drains),  # the weights of the last step, which no pass reads
        "LATE_UPDATE": _late_update(plan),
        "DECLARE_WEIGHTS": " ".join(f"{name} w{i};" for i, name in enumerate(types)),
        "LOAD_WEIGHTS": " ".join(f"w{i}.move_all<true>(c);" for i in range(last + 1)),
        "SEND_WEIGHTS": " ".join(sent),
        "SAVE_WEIGHTS": " ".join(f"w{i}.move_all<false>(c);" for i in range(last + 1)),
    }
