"""A plan as CUDA C++: its numbers as constants, its phases as calls. The library they call is in `cuda/`."""

from __future__ import annotations

from onelaunch.rng import keep_scale, keep_threshold, permutation_bits
from onelaunch.train.engines.resident.plan import FLAG_STRIDE, INTERVAL, THREADS, WARPS, Layer, Plan
from onelaunch.train.network import Activation, Dropout
from onelaunch.train.schedule import SCHEDULES
from onelaunch.train.spec import LOSSES, OPTIMIZERS

PIXEL_SCALE = {"bf16": 64 / 255, "fp16": 1 / 255}  # bytes enter as u / 64 or as u, whichever the format holds exactly
ACTIVATIONS = {"tanh": "tanh_of"}  # the others have the name of their function


def source_of(plan: Plan, *, faults: bool = False, stamps: bool = False) -> str:
    """`faults` compiles in the injected fault; `stamps` the clocks that tell what each phase costs."""
    parts = [_constants(plan, faults, stamps), '#include "activations.cuh"', '#include "random.cuh"']
    parts += [_layer(plan, layer) for layer in plan.layers]
    parts += [_phases("FORWARD_PHASES", _forward(plan), plan), _phases("BACKWARD_PHASES", _backward(plan), plan)]
    return "\n".join([*parts, _weights(plan), '#include "kernel.cuh"', ""])


def loss_scale(plan: Plan) -> float:
    """A power of two that lifts fp16 gradients, which a mean over rows makes small, above its smallest numbers."""
    return float(2 ** (3 + (plan.settings.batch - 1).bit_length())) if plan.settings.precision == "fp16" else 1.0


def _float(value: float) -> str:
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _half(plan: Plan) -> str:
    return "fp16" if plan.settings.precision == "fp16" else "bf16"


def _input_scale(plan: Plan) -> float:
    return PIXEL_SCALE[_half(plan)] if plan.settings.bytes_input else 1.0


def _constants(plan: Plan, faults: bool, stamps: bool) -> str:
    settings, shared, layers = plan.settings, plan.shared, plan.layers
    last = layers[-1].stage.linear
    words = plan.target_words
    numbers = {
        "WARPS": WARPS, "THREADS": THREADS, "BLOCKS": plan.blocks, "BATCH": settings.batch, "ROWS": plan.rows,
        "ROW_TILES": plan.row_tiles, "GROUP_TILES": plan.group, "MICRO": plan.micro_batches, "PLANES": plan.planes,
        "X_PLANES": plan.input_planes, "X_BYTES": plan.input_bytes,
        "X_PITCH": plan.input_pitch, "X_SHARED_PITCH": plan.shared_pitch, "X_BUFFERS": plan.input_buffers,
        "X_BUFFER_BYTES": plan.input_buffer_bytes, "INTERVAL": INTERVAL, "LOOKS": plan.looks,
        "LOSS_WARPS": min(WARPS, 2 * plan.group), "FINISH": plan.finish,
        "LOT": plan.lot, "AT_STAGING": shared.regions["staging"].offset if "staging" in shared.regions else 0,
        "PERMUTATION_BITS": permutation_bits(settings.rows), "STATES": plan.states, "OUTPUTS": last.outputs,
        "TARGET_WORDS": words, "LOSS_UNITS": words, "PARTIALS_BYTES": plan.partials_bytes,
        "PARTIAL_BUFFERS": plan.partial_buffers, "EXCHANGES": plan.exchanges,
        "DECISION": plan.decision, "PHASES": 1 + len(phase_names(plan)), "LAYERS": len(layers),
        "FLAG_STRIDE": FLAG_STRIDE, "SHARED_BYTES": shared.size,
        "AT_X": shared["inputs"], "AT_TARGETS": shared["targets"], "AT_PARTIALS": shared["partial sums"],
        "AT_LOSSES": shared["losses"], "AT_CORRECT": shared["correct"], "AT_DECISION": shared["decision"],
        "AT_RATES": shared["rates"], "AT_ROWS": shared["row numbers"], "AT_KEYS": shared["round keys"],
        "AT_BARRIERS": shared["barriers"],
    }  # fmt: skip
    flags = {
        "HALF_IS_BF16": _half(plan) == "bf16", "WEIGHT_DECAY": settings.weight_decay, "NESTEROV": settings.nesterov,
        "SMOOTHS": settings.smooths, "FAULTS": faults, "VALIDATES": settings.validates,
    }  # fmt: skip
    lines = [f"#define IS_CLUSTER {int(plan.cluster)}", f"#define STAMPS {int(stamps)}"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    for name, options, chosen in (
        ("OPTIMIZER", OPTIMIZERS, settings.optimizer), ("LOSS", LOSSES, settings.loss),
        ("SCHEDULE", SCHEDULES, settings.schedule),
    ):  # fmt: skip
        names = {"bce_with_logits": "BCE"}
        lines.append(f"enum {{ {', '.join(names.get(option, option).upper() for option in options)} }};")
        lines.append(f"constexpr int {name} = {names.get(chosen, chosen).upper()};")
    scale = loss_scale(plan)
    lines.append(f"constexpr float LOSS_SCALE = {_float(scale)}, BIAS_SCALE = {_float(1 / scale)};")
    cases = [f"i == {plan.decision} ? 4" if plan.blocks > 1 else "false ? 0"]
    for layer in layers[: plan.hidden]:
        bytes_ = plan.exchanged_bytes(layer)
        cases.append(f"i == {plan.values_exchange(layer)} ? {bytes_}")
        if not layer.first:
            received = plan.planes * layer.input_tiles * plan.blocks * layer.tiles * 128
            cases += [
                f"i == {plan.deltas_exchange(layer)} ? {bytes_}",
                f"i == {plan.back_exchange(layer)} ? {received}",
            ]
    if plan.hidden:
        received = plan.planes * layers[-1].tiles * plan.blocks * layers[-2].tiles * 128
        cases.append(f"i == {plan.last_exchange} ? {received}")
    lines.append(
        "__device__ constexpr unsigned exchange_bytes(unsigned i) { return " + " : ".join([*cases, "0"]) + "; }"
    )
    return "\n".join(lines)


def _chain(layer: Layer) -> list[str]:
    """The elementwise layers after a Linear, on N values and the slopes by them."""
    values = "float (&z)[N], float (&slope)[N]"
    lines = [f"template <int N> INLINE static void chain({values}, const Draw& draw, u32 row, u32 unit) {{"]
    for operation in layer.stage.chain:
        match operation:
            case Activation():
                name = ACTIVATIONS.get(operation.name, operation.name)
                slope = f", {_float(operation.slope)}" if operation.name == "leaky_relu" else ""
                lines.append(f"  {name}(z, slope{slope});")
            case Dropout() if operation.p > 0:
                numbers = f"{keep_threshold(operation.p)}u, {_float(keep_scale(operation.p))}"
                lines.append(f"  dropout(z, slope, draw, {operation.layer}, row, unit, {numbers});")
    return [*lines, "}"]


def _layer(plan: Plan, layer: Layer) -> str:
    linear, name = layer.stage.linear, f"layer {layer.index}: "
    flat = sum(
        before.stage.linear.outputs * (before.stage.linear.inputs + before.stage.linear.bias)
        for before in plan.layers[: layer.index]
    )
    scale = _input_scale(plan) if layer.first else 1.0

    def at(what: str) -> int:
        for memory in (plan.shared, plan.exchange):
            if name + what in memory.regions:
                return memory[name + what]
        return 0

    numbers = {
        "IN": linear.inputs, "OUT": linear.outputs, "KT": layer.steps, "KS": layer.steps_a_warp, "NT": layer.tiles,
        "UNITS": layer.units, "SPLIT": layer.split, "OUT_KT": layer.output_steps,
        "IN_PLANES": plan.input_planes if layer.first else plan.planes, "IN_TILES": layer.input_tiles,
        "WEIGHT_AT": flat, "BIAS_AT": flat + linear.outputs * linear.inputs, "AT_MASTERS": at("masters"),
        "AT_STATES": at("states"), "AT_GRADIENTS": at("gradients"), "AT_BIAS": at("bias"), "AT_BIAS_SUMS": at("bias sums"),
        "AT_DELTA": at("deltas"), "AT_SLOPE": at("slopes"), "AT_OUT": at("values of all"),
        "AT_ALL_DELTAS": at("deltas of all"), "AT_BACK": at("weights back"),
        "OUT_STRIDE": (plan.out_buffers(layer) - 1) * plan.out_bytes(layer),
        "BACK_BYTES": plan.back_bytes(layer), "OUT_EXCHANGE": plan.values_exchange(layer),
        "DELTA_EXCHANGE": 0 if layer.first else plan.deltas_exchange(layer),
        "BACK_EXCHANGE": 0 if layer.first else plan.back_exchange(layer), "LAST_EXCHANGE": plan.last_exchange,
        "AT_OWN": at("own values"), "AT_COPIES": at("weights of all"), "COPIES_BYTES": plan.copies_bytes(),
    }  # fmt: skip
    flags = {
        "FIRST": layer.first, "REPLICATED": layer.last, "BIAS": linear.bias, "MASTERS_SHARED": layer.masters_shared,
        "STATES_SHARED": layer.states_shared, "KEEPS_VALUES": plan.keeps_values(layer),
    }  # fmt: skip
    lines = [f"struct Layer{layer.index} {{  // {linear.inputs} to {linear.outputs}"]
    lines += [f"  static constexpr int {key} = {value};" for key, value in numbers.items()]
    lines += [f"  static constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()]
    lines.append(
        f"  static constexpr float INPUT_SCALE = {_float(scale)}, GRADIENT_SCALE = {_float(scale / loss_scale(plan))};"
    )
    lines += [f"  {line}" for line in _chain(layer)]
    return "\n".join([*lines, "};"])


def _read(layer: Layer, transposed: str = "") -> str:
    """How a warp reads its inputs of a layer: from the rows fetched, or from everyone's values of the layer before."""
    head = "[&](int m, int ks, int plane, u32 (&left)[4]) {"
    if layer.first:
        return f"{head} Inputs<Layer0>::read{transposed}(c, buffer, m, ks, plane, left); }}"
    before = f"Layer{layer.index - 1}"
    return (
        f"{head} read_left{transposed}<{before}::AT_OUT, {before}::OUT_STRIDE, {before}::OUT_KT>"
        f"(c, c.passes, plane * ROW_TILES + m, ks, left); }}"
    )


def _forward(plan: Plan) -> list[tuple[str, str]]:
    """The phases of a forward pass with their names, up to and with the loss."""
    lines = [("rows arrive", "Inputs<Layer0>::arrive();")]
    for layer in plan.layers:
        name, index = f"Layer{layer.index}", layer.index
        if not layer.first:
            before = f"Layer{index - 1}"
            wait = f"wait_for<{before}::OUT_EXCHANGE>(c, c.passes, {before}::OUT_KT, {before}::NT);"
            if not plan.cluster and plan.blocks > 1:
                wait += f" stage<{before}::AT_OUT, {before}::OUT_STRIDE, {before}::OUT_KT>(c, c.passes); staged();"
            lines.append((f"wait for values {index - 1}", wait))
        if layer.last:
            sums = f"multiply<{name}>(c, w{index}, group, sum, {_read(layer)});"
            if layer.owned_by_input:
                lines.append((f"wait for weights {index}", f"wait_for_copies<{name}>(c, c.step + trained);"))
                sums = f"multiply_copies<{name}>(c, c.step + trained, group, sum, {_read(layer)});"
            product = f"[&](int group, float (&sum)[GROUP_TILES][{name}::NT][4]) {{ {sums} }}"
            lines.append((f"outputs {index}", f"outputs<{name}>(c, draw, tally, {product});"))
        else:
            lines.append((f"forward {index}", f"forward<{name}>(c, w{index}, draw, {_read(layer)});"))
        if layer.first:
            lines.append(("fetch the next rows", "next_inputs();"))
    return lines


def _backward(plan: Plan) -> list[tuple[str, str]]:
    lines = []
    for layer in reversed(plan.layers):
        name, before, index = f"Layer{layer.index}", f"Layer{layer.index - 1}", layer.index
        if not layer.first and layer.last:
            lines.append((f"back {index}", f"back_from_outputs<{name}, {before}>(c);"))
        elif not layer.first:
            waits = f"wait_for<{name}::DELTA_EXCHANGE>(c, c.backs, {name}::OUT_KT, {name}::NT); "
            waits += f"wait_for_weights<{name}>(c, micro == 0);"
            lines += [(f"wait for deltas {index}", waits), (f"back {index}", f"back<{name}, {before}>(c);")]
        update = f"update<{name}>(c, w{index}, rates, rule, micro == 0, last, {_read(layer, '_transposed')});"
        if not plan.cluster and plan.blocks > 1 and not layer.first and not layer.last:
            later = int(layer.index == 1 and plan.input_buffers == 1)  # the next rows are on their way too
            update = f"staged<{later}>(); {update}"
        if layer.owned_by_input:
            update = f"update_last<{name}, {before}>(c, w{index}, rates, rule, micro == 0, last);"
        lines.append((f"update {index}", update))
    if plan.input_buffers == 1:  # the first layer's update before the second's, which hides the next rows' way
        first, back = lines.pop(), [name for name, _ in lines].index("back 1") if len(plan.layers) > 1 else -1
        lines[back + 1 : back + 1] = [first, ("fetch the next rows", "__syncthreads(); fetch_next();")]
    return lines


def phase_names(plan: Plan) -> list[str]:
    """The phases of a training pass in their order, as the stamps count them; the first is what lies between passes."""
    return [name for name, _ in [*_forward(plan), *_backward(plan)]]


def _phases(macro: str, phases: list[tuple[str, str]], plan: Plan) -> str:
    """The phases as statements, each with its stamp."""
    names = phase_names(plan)
    lines = [f"  {call} STAMP({1 + names.index(name)})" for name, call in phases]
    return " \\\n".join([f"#define {macro}", *lines])


def _weights(plan: Plan) -> str:
    """What is done with every layer's weights: declared, loaded, handed to those who need copies, saved."""
    last = len(plan.layers) - 1
    types = [f"Weights<Layer{i}>" for i in range(last)]
    types.append(f"LastWeights<Layer{last}, Layer{last - 1}>" if last else "Weights<Layer0>")
    handed = [f"send_all_back<Layer{i}>(c, w{i}, 0);" for i in range(1, last)]
    handed += [f"hand_out_all<Layer{last}, Layer{last - 1}>(c, w{last}, 0);"] if last else []
    macros = {
        "DECLARE_WEIGHTS": [f"{name} w{i};" for i, name in enumerate(types)],
        "LOAD_WEIGHTS": [f"w{i}.move_all<true>(c);" for i in range(last + 1)],
        "HAND_OUT_WEIGHTS": handed,
        "SAVE_WEIGHTS": [f"w{i}.move_all<false>(c);" for i in range(last + 1)],
    }
    return "\n".join(f"#define {name} {' '.join(statements)}" for name, statements in macros.items())
