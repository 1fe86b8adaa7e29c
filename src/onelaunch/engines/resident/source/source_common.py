"""What the sources of both kinds of plans share: the run's constants, the struct of a layer, phases as macros."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.plan import Phases, Plan
from onelaunch.engines.resident.plan.settings import FLAG_STRIDE, INTERVAL, MAX_DROPOUTS
from onelaunch.engines.resident.plan.stages import dropouts_of
from onelaunch.nvrtc import activations
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import keep_scale, keep_threshold, permutation_bits
from onelaunch.run.network import Activation, Dropout
from onelaunch.run.schedule import FINAL_DIVISOR, MIN_ONE_CYCLE_STEPS, SCHEDULES, START_DIVISOR, WARM_UP
from onelaunch.run.spec import LOSSES

HEADERS = Path(__file__).parents[1] / "cuda"
UINT8_SCALE = {
    "bf16": 64 / 255,
    "fp16": 1 / 255,
}  # a byte u is multiplied as u / 64 or as u: what the format holds exactly
FLOAT_MIN = 2.0**-150  # half of the smallest float32
MEMORIES = ("registers", "shared memory", "device memory")  # of tiles, as cuda/weights.cuh numbers them
PREPROCESSOR = ("BY_ROWS", "SUMS_OUTPUTS")  # constants that choose which headers are included


def source_text(
    plan: Plan, *, own: Mapping[str, int], exchanged: Mapping[int, str], layers: list[str], forward: Phases,
    backward: Phases, weights: Mapping[str, str], faults: bool, stamps: bool,
) -> str:  # fmt: skip
    """The translation unit of a plan.

    `own`: constants of this kind of plan. `exchanged`: bytes that block `rank` receives, as an expression, by exchange.
    `weights`: macros that declare, load, send and save the weights.
    """
    names = [name for name, _ in (*forward, *backward)]
    lines = _constants(plan, len(names), own, exchanged, faults=faults, stamps=stamps)
    lines += [activations.constants(), '#include "activations.cuh"', '#include "random.cuh"', *layers]
    lines += [_phases("FORWARD_PHASES", forward, names), _phases("BACKWARD_PHASES", backward, names)]
    lines += [f"#define {name} {statements}" for name, statements in weights.items()]
    return "\n".join([*lines, '#include "kernel.cuh"', ""])


def loss_scale(plan: Plan) -> float:
    """A power of two that keeps fp16 gradients, which the mean over rows makes small, above the smallest fp16 numbers."""
    return float(2 ** (3 + (plan.settings.batch - 1).bit_length())) if plan.settings.precision == "fp16" else 1.0


def _float(value: float) -> str:
    if abs(value) < FLOAT_MIN:  # a literal that rounds to zero is an error to the compiler
        return "0.0f"
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _operand_type(plan: Plan) -> str:
    return "fp16" if plan.settings.precision == "fp16" else "bf16"


def _constants(
    plan: Plan, phases: int, own: Mapping[str, int], exchanged: Mapping[int, str], *, faults: bool, stamps: bool
) -> list[str]:
    settings, shared = plan.settings, plan.shared
    numbers = {
        "WARPS": plan.warps, "THREADS": plan.threads, "BLOCKS": plan.blocks, "BATCH": settings.batch, "ROWS": plan.rows,
        "ROW_TILES": plan.row_tiles, "MICRO_BATCHES": plan.micro_batches, "PLANES": plan.planes,
        "X_PLANES": plan.input_planes, "X_BYTES": plan.input_bytes, "X_PITCH": plan.input_pitch,
        "X_SHARED_PITCH": plan.shared_pitch, "X_BUFFERS": plan.input_buffers, "X_BUFFER_BYTES": plan.input_buffer_bytes,
        "INTERVAL": INTERVAL, "TABLES_PER_HOST_POLL": plan.tables_per_host_poll,
        "STEPS_PER_ROW_TABLE": plan.steps_per_row_table, "TABLE_ROWS": plan.table_rows, "STATES": plan.states,
        "PERMUTATION_BITS": 0 if settings.members else permutation_bits(settings.rows),
        "OUTPUTS": settings.stages[-1].linear.outputs, "TARGET_WORDS": plan.target_words,
        "LOSS_UNITS": plan.loss_units, "EXCHANGES": plan.exchanges,
        "DECISION": plan.decision, "PHASES": 1 + phases, "FLAG_STRIDE": FLAG_STRIDE,
        "RUN_BYTES": shared["member"] if settings.members else shared.size, "EXCHANGE_BYTES": plan.exchange.size,
        "AT_MEMBER": shared["member"] if settings.members else 0, "MAX_DROPOUTS": MAX_DROPOUTS,
        "BLOCKS_PER_MULTIPROCESSOR": settings.per_multiprocessor, "AT_X": shared["inputs"], "AT_TARGETS": shared["targets"],
        "AT_LOSSES": shared["losses"], "AT_CORRECT": shared["correct"], "AT_BROKEN": shared["broken"],
        "AT_VALIDATION_LOSS": shared["validation loss"], "AT_DECISION": shared["decision"],
        "AT_RATES": shared["rates"], "AT_ROWS": shared["row numbers"], "AT_KEYS": shared["round keys"],
        "AT_BARRIERS": shared["barriers"], "AT_ROW_BARRIERS": shared["row barriers"], "AT_FAULT": shared["fault"],
        **{name: value for name, value in own.items() if name not in PREPROCESSOR},
    }  # fmt: skip
    flags = {
        "IS_BF16": _operand_type(plan) == "bf16", "WEIGHT_DECAY": settings.weight_decay, "NESTEROV": settings.nesterov,
        "LABEL_SMOOTHING": settings.label_smoothing, "FAULTS": faults, "VALIDATES": settings.validates,
        "TINY_EPS": settings.tiny_eps,
        "MULTICASTS_ROWS": plan.multicasts_rows, "BIAS_CORRECTION": OPTIMIZERS[settings.optimizer].bias_correction,
    }  # fmt: skip
    lines = [f"#define IS_CLUSTER {int(plan.cluster)}", f"#define STAMPS {int(stamps)}"]
    lines += [f"#define MEMBERS {int(settings.members)}", f"#define WEIGHTED {int(settings.weighted)}"]
    lines += [f"#define {name} {own[name]}" for name in PREPROCESSOR]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    for name, options, chosen in (
        ("OPTIMIZER", tuple(OPTIMIZERS), settings.optimizer),
        ("LOSS", LOSSES, settings.loss),
        ("SCHEDULE", SCHEDULES, settings.schedule),
    ):
        lines.append(f"enum {{ {', '.join(option.upper() for option in options)} }};")
        lines.append(f"constexpr int {name} = {chosen.upper()};")
    lines.append(f"constexpr double WARM_UP = {WARM_UP!r}, START_DIVISOR = {START_DIVISOR!r};")
    lines.append(f"constexpr double FINAL_DIVISOR = {FINAL_DIVISOR!r}, MIN_ONE_CYCLE_STEPS = {MIN_ONE_CYCLE_STEPS};")
    scale = loss_scale(plan)
    lines.append(f"constexpr float LOSS_SCALE = {_float(scale)}, BIAS_SCALE = {_float(1 / scale)};")
    cases = [f"i == {number} ? {size}" for number, size in {**exchanged, plan.decision: "4"}.items()]
    body = f"return {' : '.join([*cases, '0'])};"
    lines.append(f"__device__ constexpr unsigned exchange_bytes(unsigned i, unsigned rank) {{ {body} }}")
    return lines


def _keep(plan: Plan, dropout: Dropout) -> tuple[str, str]:
    """The threshold and the scale of a dropout: constants, or in the parameters of a member."""
    if not plan.settings.members:
        return f"{keep_threshold(dropout.p)}u", _float(keep_scale(dropout.p))
    number = [part.layer for part in dropouts_of(plan.settings.stages)].index(dropout.layer)
    return f"draw.keep[{2 * number}]", f"__uint_as_float(draw.keep[{2 * number + 1}])"


def _chain(plan: Plan, layer: Layer) -> list[str]:
    """The function that applies the elementwise layers after a Linear to N values and multiplies their slopes."""
    values = "float (&z)[N], float (&slope)[N]"
    lines = [f"template <int N> INLINE static void chain({values}, const Draw& draw, u32 row, u32 unit) {{"]
    for operation in layer.stage.chain:
        match operation:
            case Activation():
                below_zero = f", {_float(operation.slope)}" if operation.name == "leaky_relu" else ""
                lines.append(f"  differentiate<{operation.name.upper()}>(z, slope{below_zero});")
            case Dropout() if operation.p > 0:
                numbers = ", ".join(_keep(plan, operation))
                lines.append(f"  dropout(z, slope, draw, {operation.layer}, row, unit, {numbers});")
    scales = [_keep(plan, part)[1] for part in layer.stage.chain if isinstance(part, Dropout) and part.p > 0]
    kept = f"INLINE static float slope_of_kept(const Draw& draw) {{ return {scales[-1] if scales else '1.f'}; }}"
    return [*lines, "}", kept]


def layer_struct(plan: Plan, layer: Layer, numbers: Mapping[str, int], flags: Mapping[str, bool]) -> str:
    """A layer's constants and its chain. `numbers` and `flags` are those of this kind of plan."""
    linear = layer.stage.linear
    weights_before = sum(
        before.stage.linear.outputs * (before.stage.linear.inputs + before.stage.linear.bias)
        for before in plan.layers[: layer.index]
    )
    scale = UINT8_SCALE[_operand_type(plan)] if layer.first and plan.settings.uint8_rows else 1.0
    numbers = {
        "IN": linear.inputs, "OUT": linear.outputs, "K_TILES": layer.k_tiles, "N_TILES": layer.n_tiles,
        "IN_PLANES": plan.input_planes if layer.first else plan.planes,
        "WEIGHT_AT": weights_before, "BIAS_AT": weights_before + linear.outputs * linear.inputs, **numbers,
    }  # fmt: skip
    flags = {"FIRST": layer.first, "BIAS": linear.bias, **flags}
    floats = {"INPUT_SCALE": scale, "GRADIENT_SCALE": scale / loss_scale(plan)}
    lines = [f"struct Layer{layer.index} {{  // {linear.inputs} to {linear.outputs}"]
    lines += [f"  static constexpr int {key} = {value};" for key, value in numbers.items()]
    lines += [f"  static constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()]
    lines += [f"  static constexpr float {key} = {_float(value)};" for key, value in floats.items()]
    lines += [f"  {line}" for line in _chain(plan, layer)]
    return "\n".join([*lines, "};"])


def _phases(macro: str, phases: Phases, names: list[str]) -> str:
    """The phases as statements, each with its stamp."""
    lines = [f"  {call} STAMP({1 + names.index(name)})" for name, call in phases]
    return " \\\n".join([f"#define {macro}", *lines])
