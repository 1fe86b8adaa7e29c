"""What the sources of all placements have in common: the run's constants, a layer's struct, phases as macros."""

from __future__ import annotations

from collections.abc import Mapping

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.settings import FLAG_STRIDE, INTERVAL, THREADS, WARPS
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import keep_scale, keep_threshold, permutation_bits
from onelaunch.run.network import Activation, Dropout
from onelaunch.run.schedule import SCHEDULES
from onelaunch.run.spec import LOSSES

PIXEL_SCALE = {"bf16": 64 / 255, "fp16": 1 / 255}  # bytes enter as u / 64 or as u, whichever the format holds exactly
ACTIVATIONS = {"tanh": "tanh_of"}  # the others have the name of their function
FLOAT_MIN = 2.0**-150  # half of the smallest float32
CHOICES = ("BY_ROWS", "SUMS_OUTPUTS")  # for the preprocessor
Phases = list[tuple[str, str]]  # names and statements


def loss_scale(plan: Plan) -> float:
    """A power of two that lifts fp16 gradients, which a mean over rows makes small, above its smallest numbers."""
    return float(2 ** (3 + (plan.settings.batch - 1).bit_length())) if plan.settings.precision == "fp16" else 1.0


def _float(value: float) -> str:
    if abs(value) < FLOAT_MIN:  # a literal that rounds to zero is an error to the compiler
        return "0.0f"
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _half(plan: Plan) -> str:
    return "fp16" if plan.settings.precision == "fp16" else "bf16"


def _input_scale(plan: Plan) -> float:
    return PIXEL_SCALE[_half(plan)] if plan.settings.bytes_input else 1.0


def constants(
    plan: Plan, phases: Phases, *, own: Mapping[str, int], exchanged: Mapping[int, str], faults: bool, stamps: bool
) -> str:
    """The run's numbers and, in `own`, the placement's; `exchanged`: bytes a block (its `rank`) receives by exchange."""
    settings, shared, layers = plan.settings, plan.shared, plan.layers
    last = layers[-1].stage.linear
    numbers = {
        "WARPS": WARPS, "THREADS": THREADS, "BLOCKS": plan.blocks, "BATCH": settings.batch, "ROWS": plan.rows,
        "ROW_TILES": plan.row_tiles, "MICRO": plan.micro_batches, "PLANES": plan.planes, "X_PLANES": plan.input_planes,
        "X_BYTES": plan.input_bytes, "X_PITCH": plan.input_pitch, "X_SHARED_PITCH": plan.shared_pitch,
        "X_BUFFERS": plan.input_buffers, "X_BUFFER_BYTES": plan.input_buffer_bytes, "INTERVAL": INTERVAL,
        "LOOKS": plan.looks, "LOT": plan.lot, "TABLE_ROWS": plan.table_rows, "STATES": plan.states,
        "PERMUTATION_BITS": permutation_bits(settings.rows),
        "OUTPUTS": last.outputs, "TARGET_WORDS": plan.target_words, "LOSS_UNITS": plan.target_words,
        "EXCHANGES": plan.exchanges, "DECISION": plan.decision, "PHASES": 1 + len(phases), "FLAG_STRIDE": FLAG_STRIDE,
        "SHARED_BYTES": shared.size, "AT_X": shared["inputs"], "AT_TARGETS": shared["targets"],
        "AT_LOSSES": shared["losses"], "AT_CORRECT": shared["correct"], "AT_BROKEN": shared["broken"],
        "AT_CHECK_LOSS": shared["validation loss"], "AT_DECISION": shared["decision"],
        "AT_RATES": shared["rates"], "AT_ROWS": shared["row numbers"], "AT_KEYS": shared["round keys"],
        "AT_BARRIERS": shared["barriers"], "AT_ROW_BARRIERS": shared["row barriers"],
        "AT_FAULT": shared["fault"],
        **{name: value for name, value in own.items() if name not in CHOICES},
    }  # fmt: skip
    flags = {
        "HALF_IS_BF16": _half(plan) == "bf16", "WEIGHT_DECAY": settings.weight_decay, "NESTEROV": settings.nesterov,
        "SMOOTHS": settings.smooths, "FAULTS": faults, "VALIDATES": settings.validates,
        "SHARES_FETCH": plan.shares_fetch,
    }  # fmt: skip
    lines = [f"#define IS_CLUSTER {int(plan.cluster)}", f"#define STAMPS {int(stamps)}"]
    lines += [f"#define {name} {own[name]}" for name in CHOICES]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    for name, options, chosen in (
        ("OPTIMIZER", tuple(OPTIMIZERS), settings.optimizer), ("LOSS", LOSSES, settings.loss),
        ("SCHEDULE", SCHEDULES, settings.schedule),
    ):  # fmt: skip
        names = {"bce_with_logits": "BCE"}
        lines.append(f"enum {{ {', '.join(names.get(option, option).upper() for option in options)} }};")
        lines.append(f"constexpr int {name} = {names.get(chosen, chosen).upper()};")
    scale = loss_scale(plan)
    lines.append(f"constexpr float LOSS_SCALE = {_float(scale)}, BIAS_SCALE = {_float(1 / scale)};")
    cases = [f"i == {number} ? {size}" for number, size in {**exchanged, plan.decision: "4"}.items()]
    body = f"return {' : '.join([*cases, '0'])};"
    lines.append(f"__device__ constexpr unsigned exchange_bytes(unsigned i, unsigned rank) {{ {body} }}")
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


def layer_struct(plan: Plan, layer: Layer, numbers: Mapping[str, int], flags: Mapping[str, bool]) -> str:
    """A layer's constants and its chain; `numbers` and `flags` are the placement's."""
    linear = layer.stage.linear
    flat = sum(
        before.stage.linear.outputs * (before.stage.linear.inputs + before.stage.linear.bias)
        for before in plan.layers[: layer.index]
    )
    scale = _input_scale(plan) if layer.first else 1.0
    numbers = {
        "IN": linear.inputs, "OUT": linear.outputs, "KT": layer.steps, "NT": layer.tiles, "WEIGHT_AT": flat,
        "IN_PLANES": plan.input_planes if layer.first else plan.planes, "BIAS_AT": flat + linear.outputs * linear.inputs,
        **numbers,
    }  # fmt: skip
    flags = {"FIRST": layer.first, "BIAS": linear.bias, **flags}
    lines = [f"struct Layer{layer.index} {{  // {linear.inputs} to {linear.outputs}"]
    lines += [f"  static constexpr int {key} = {value};" for key, value in numbers.items()]
    lines += [f"  static constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()]
    lines.append(
        f"  static constexpr float INPUT_SCALE = {_float(scale)}, GRADIENT_SCALE = {_float(scale / loss_scale(plan))};"
    )
    lines += [f"  {line}" for line in _chain(layer)]
    return "\n".join([*lines, "};"])


def phases_macro(macro: str, phases: Phases, names: list[str]) -> str:
    """The phases as statements, each with its stamp."""
    lines = [f"  {call} STAMP({1 + names.index(name)})" for name, call in phases]
    return " \\\n".join([f"#define {macro}", *lines])
