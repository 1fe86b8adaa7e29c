"""A plan as CUDA C++: its numbers as constants, its phases as calls. The library they call is in `cuda/`."""

from __future__ import annotations

from onelaunch.rng import keep_scale, keep_threshold, permutation_bits
from onelaunch.train.engines.resident.plan import FLAG_STRIDE, INTERVAL, THREADS, WARPS, Layer, Plan
from onelaunch.train.network import Activation, Dropout
from onelaunch.train.spec import LOSSES, OPTIMIZERS
from onelaunch.train.schedule import SCHEDULES

PIXEL_SCALE = {"bf16": 64 / 255, "fp16": 1 / 255}  # bytes enter as u / 64 or as u, whichever the format holds exactly
ACTIVATIONS = {"tanh": "tanh_of"}  # the others have the name of their function


def source_of(plan: Plan, *, faults: bool = False, stamps: bool = False) -> str:
    """`faults` compiles in the injected fault; `stamps` the clocks that tell what each phase costs."""
    parts = [_constants(plan, faults), '#include "base.cuh"', '#include "random.cuh"', _draw(), *map(_chain, plan.layers)]
    if stamps:
        parts.append("#define STAMP(i) if (threadIdx.x == 0) { const u32 now = (u32)clock_now(); spent[i] += now - stamped; stamped = now; }")
    parts += ['#include "train.cuh"', *(_layer(plan, layer) for layer in plan.layers), _kernel(plan, stamps)]
    return "\n".join(parts)


def loss_scale(plan: Plan) -> float:
    """A power of two that lifts fp16 gradients, which a mean over rows makes small, above its smallest numbers."""
    return float(2 ** (3 + (plan.settings.batch - 1).bit_length())) if plan.settings.precision == "fp16" else 1.0


def _float(value: float) -> str:
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _half(plan: Plan) -> str:
    return "fp16" if plan.settings.precision == "fp16" else "bf16"


def _input_scale(plan: Plan) -> float:
    return PIXEL_SCALE[_half(plan)] if plan.settings.bytes_input else 1.0


def _constants(plan: Plan, faults: bool) -> str:
    settings, shared, layers = plan.settings, plan.shared, plan.layers
    last = layers[-1].stage.linear
    words = plan.target_words
    numbers = {
        "WARPS": WARPS, "THREADS": THREADS, "BLOCKS": plan.blocks, "BATCH": settings.batch, "ROWS": plan.rows,
        "ROW_TILES": plan.row_tiles, "GROUP_TILES": plan.group, "MICRO": plan.micro_batches, "PLANES": plan.planes,
        "X_PLANES": plan.input_planes, "X_BYTES": plan.input_bytes,
        "X_PITCH": plan.input_pitch, "X_SHARED_PITCH": plan.shared_pitch, "X_BUFFERS": plan.input_buffers,
        "X_BUFFER_BYTES": plan.input_buffer_bytes, "INTERVAL": INTERVAL, "LOOKS": plan.looks, "FINISH": plan.finish,
        "LOT": plan.lot, "AT_STAGING": shared.regions["staging"].offset if "staging" in shared.regions else 0,
        "PERMUTATION_BITS": permutation_bits(settings.rows), "STATES": plan.states, "OUTPUTS": last.outputs,
        "TARGET_WORDS": words, "LOSS_UNITS": words, "PARTIALS_BYTES": plan.partials_bytes,
        "PARTIAL_BUFFERS": plan.partial_buffers, "EXCHANGES": plan.exchanges,
        "DECISION": plan.decision, "FLAG_STRIDE": FLAG_STRIDE, "SHARED_BYTES": shared.size,
        "AT_X": shared["inputs"], "AT_TARGETS": shared["targets"], "AT_PARTIALS": shared["partial sums"],
        "AT_LOSSES": shared["losses"], "AT_CORRECT": shared["correct"], "AT_DECISION": shared["decision"],
        "AT_RATES": shared["rates"], "AT_ROWS": shared["row numbers"], "AT_KEYS": shared["round keys"],
        "AT_BARRIERS": shared["barriers"],
    }  # fmt: skip
    flags = {
        "HALF_IS_BF16": _half(plan) == "bf16", "WEIGHT_DECAY": settings.weight_decay, "NESTEROV": settings.nesterov,
        "SMOOTHS": settings.smooths, "FAULTS": faults,
    }  # fmt: skip
    lines = [f"#define IS_CLUSTER {int(plan.cluster)}"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    for name, options, chosen in (
        ("OPTIMIZER", OPTIMIZERS, settings.optimizer), ("LOSS", LOSSES, settings.loss), ("SCHEDULE", SCHEDULES, settings.schedule)
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
            cases += [f"i == {plan.deltas_exchange(layer)} ? {bytes_}", f"i == {plan.back_exchange(layer)} ? {received}"]
    if plan.hidden:
        received = plan.planes * layers[-1].tiles * plan.blocks * layers[-2].tiles * 128
        cases.append(f"i == {plan.last_exchange} ? {received}")
    lines.append("__device__ constexpr unsigned exchange_bytes(unsigned i) { return " + " : ".join([*cases, "0"]) + "; }")
    return "\n".join(lines)


def _draw() -> str:
    return '#include "activations.cuh"\nstruct Draw;'


def _chain(layer: Layer) -> str:
    """A function for the elementwise layers after a Linear; defined where Draw is known."""
    return f"template <int N> INLINE void chain{layer.index}(float (&z)[N], float (&slope)[N], const Draw& draw, u32 row, u32 unit);"


def _chain_body(layer: Layer) -> str:
    lines = []
    for operation in layer.stage.chain:
        match operation:
            case Activation():
                name = ACTIVATIONS.get(operation.name, operation.name)
                slope = f", {_float(operation.slope)}" if operation.name == "leaky_relu" else ""
                lines.append(f"  {name}(z, slope{slope});")
            case Dropout():
                if operation.p > 0:
                    lines.append(
                        f"  if (draw.training) {{ float keep[N]; keep_factors(keep, draw.seed, {operation.layer}, draw.step, row, "
                        f"unit, {keep_threshold(operation.p)}u, {_float(keep_scale(operation.p))});\n"
                        "    for (int e = 0; e < N; ++e) { z[e] *= keep[e]; slope[e] *= keep[e]; } }"
                    )
    head = f"template <int N> INLINE void chain{layer.index}(float (&z)[N], float (&slope)[N], const Draw& draw, u32 row, u32 unit) {{"
    return "\n".join([head, *lines, "}"])


def _layer(plan: Plan, layer: Layer) -> str:
    linear, name = layer.stage.linear, f"layer {layer.index}: "
    flat = sum(before.stage.linear.outputs * (before.stage.linear.inputs + before.stage.linear.bias) for before in plan.layers[: layer.index])
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
        "AT_ALL_DELTAS": at("deltas of all"), "AT_BACK": at("weights back"), "OUT_STRIDE": (plan.out_buffers(layer) - 1) * plan.out_bytes(layer),
        "BACK_BYTES": plan.back_bytes(layer), "OUT_EXCHANGE": plan.values_exchange(layer),
        "DELTA_EXCHANGE": 0 if layer.first else plan.deltas_exchange(layer),
        "BACK_EXCHANGE": 0 if layer.first else plan.back_exchange(layer), "LAST_EXCHANGE": plan.last_exchange,
        "AT_OWN": at("own values"), "AT_COPIES": at("weights of all"), "COPIES_BYTES": plan.copies_bytes(),
    }  # fmt: skip
    flags = {
        "FIRST": layer.first, "REPLICATED": layer.last, "BIAS": linear.bias, "MASTERS_SHARED": layer.masters_shared,
        "STATES_SHARED": layer.states_shared, "KEEPS_VALUES": plan.keeps_values(layer),
    }  # fmt: skip
    lines = [_chain_body(layer), f"struct Layer{layer.index} {{  // {linear.inputs} to {linear.outputs}"]
    lines += [f"  static constexpr int {key} = {value};" for key, value in numbers.items()]
    lines += [f"  static constexpr bool {key} = {str(value).lower()};" for key, value in flags.items()]
    lines.append(f"  static constexpr float INPUT_SCALE = {_float(scale)}, GRADIENT_SCALE = {_float(scale / loss_scale(plan))};")
    lines.append("  template <int N> INLINE static void chain(float (&z)[N], float (&slope)[N], const Draw& draw, u32 row, u32 unit) {")
    lines += [f"    chain{layer.index}(z, slope, draw, row, unit);", "  }", "};"]
    return "\n".join(lines)


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
            waits = f"wait_for<{name}::DELTA_EXCHANGE>(c, c.backs, {name}::OUT_KT, {name}::NT); wait_for_weights<{name}>(c, micro == 0);"
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


def _kernel(plan: Plan, stamps: bool) -> str:
    validates = plan.settings.validates
    last = len(plan.layers) - 1
    types = [f"Weights<Layer{i}>" for i in range(last)] + [f"LastWeights<Layer{last}, Layer{last - 1}>" if last else "Weights<Layer0>"]
    weights = "\n  ".join(f"{name} w{i};" for i, name in enumerate(types))
    load = "\n  ".join(f"w{i}.move_all<true>(c);" for i in range(len(plan.layers)))
    save = "\n  ".join(f"w{i}.move_all<false>(c);" for i in range(len(plan.layers)))
    back = "\n  ".join(f"send_all_back<Layer{i}>(c, w{i}, 0);" for i in range(1, last))
    back += f"\n  hand_out_all<Layer{last}, Layer{last - 1}>(c, w{last}, 0);" if last else ""
    names = phase_names(plan)

    def stamp(index: int) -> str:
        return f"STAMP({index})" if stamps else ""

    def stamped(lines: list[tuple[str, str]]) -> list[str]:
        return [f"{line} {stamp(1 + names.index(name))}" for name, line in lines]

    plain, forward, backward = [line for _, line in _forward(plan)], stamped(_forward(plan)), stamped(_backward(plan))
    pad, deep = "\n        ", "\n      "
    check = (
        f"""
    if (ends) {{
      u32 before = load_word(c.shared + AT_CORRECT);
      double check_loss = 0;
      const u32 count = (u32)((p->check_rows + ROWS - 1) / ROWS);
      for (u32 part = 0; part < count; ++part) {{
        const u64 at = (u64)part * ROWS;
        const Draw draw = {{p->seed, 0, 0, false}};
        constexpr u32 trained = 1;  // the update of this step is made
        const Tally tally = {{(u32)(p->check_rows - at < ROWS ? p->check_rows - at : ROWS), 0.f, smoothing, Inputs<Layer0>::targets_at(c, buffer)}};
        auto next_inputs = [&]() {{
          if (part + 1 < count) fetch_check(part + 1, buffer ^ (X_BUFFERS - 1));
          else if (step + 1 < p->last_step) fetch(1, 0, buffer ^ (X_BUFFERS - 1));
        }};
        {pad.join(plain)}
        buffer ^= X_BUFFERS - 1;
        __syncthreads();
        if (threadIdx.x == 0) check_loss += sum_of_losses(c);
        ++c.passes;
      }}
      __syncthreads();
      const u32 after = load_word(c.shared + AT_CORRECT);
      __syncthreads();
      if (threadIdx.x == 0) store_word(c.shared + AT_CORRECT, before);
      record_epoch(c, epoch++, check_loss, after - before);
    }}"""
        if validates
        else "\n    if (ends) record_epoch(c, epoch++, 0, 0);"
    )
    meet = "meet_cluster();" if plan.cluster else "__syncthreads();"
    return f"""
extern "C" __global__ void __launch_bounds__(THREADS, 1) train(const __grid_constant__ Params params) {{
  extern __shared__ __align__(1024) u8 memory[];
  {f"constexpr int PHASES = {len(names)}; __shared__ u32 spent[PHASES + 1]; u32 stamped = (u32)clock_now(); if (threadIdx.x <= PHASES) spent[threadIdx.x] = 0;" if stamps else ""}
  const Params* p = &params;
  Context c;
  c.p = p, c.lane = threadIdx.x & 31, c.warp = threadIdx.x >> 5, c.g = c.lane >> 2, c.q = c.lane & 3;
  c.rank = blockIdx.x, c.shared = shared_address(memory);
  c.passes = c.backs = c.step = c.turn = 0, c.copies = ~0u, c.dead = false;
  {"for (u32 i = 0; i < (BLOCKS + 3) / 4; ++i) c.remote[i] = at_block(c.shared, i * 4 + c.q);" if plan.cluster else ""}
  for (u32 i = threadIdx.x; i < SHARED_BYTES / 4; i += THREADS) store_word(c.shared + i * 4, 0);
  __syncthreads();
  {"make_barriers(c);" if plan.cluster else ""}
  {meet}
  {weights}
  {load}
  {back}
  const Rule rule = {{(float)p->momentum, (float)p->weight_decay, (float)p->new_mean, (float)p->new_square, (float)p->beta2, (float)p->eps}};
  const float smoothing = (float)p->smoothing;
  u64 step = p->first_step;
  u32 ahead = 0;  // of the step the table of rates begins with
  u32 place = (u32)(step % p->steps_per_epoch), looks = 0, since = 0, epoch = 0, buffer = 0;
  float loss = 0.f;
  bool broken = false;
  auto fetch = [&](u32 later, u32 micro, u32 into) {{
    const u32 at = place + later == (u32)p->steps_per_epoch ? 0 : place + later;
    Inputs<Layer0>::fetch(c, into, p->x, p->y, p->rows * X_PITCH, row_table(c, (u32)step + later, micro), 0, micro_rows(rows_at(p, at), micro));
  }};
  {"auto fetch_check = [&](u32 part, u32 into) { const u64 at = (u64)part * ROWS; Inputs<Layer0>::fetch(c, into, p->check_x, p->check_y, p->check_rows * X_PITCH, 0, at, (u32)(p->check_rows - at < ROWS ? p->check_rows - at : ROWS)); };" if validates else ""}
  fill_rates(c, step);
  find_rows(c, step / LOT * LOT);
  find_rows(c, step / LOT * LOT + LOT);
  fetch(0, 0, 0);
  while (step < p->last_step) {{
    if (ahead == INTERVAL) {{
      if (++since == LOOKS) {{
        since = 0;
        if (!look(c, looks++, step, loss, broken)) break;
      }}
      fill_rates(c, step);
      ahead = 0;
    }}
    float scalars[4];
    load_shared(c.shared + AT_RATES + ahead * 16, scalars);
    const Rates rates = {{scalars[0], scalars[1], scalars[2], scalars[3]}};
    const bool ends = place + 1 == (u32)p->steps_per_epoch || step + 1 == p->total_steps;
    const u32 all_rows = rows_at(p, place), count = (all_rows + ROWS - 1) / ROWS;
    {stamp(0)}
    float total = 0.f;
    bool leave = false;
    for (u32 micro = 0; micro < (MICRO == 1 ? 1 : count); ++micro) {{
      const bool last = MICRO == 1 || micro + 1 == count;
      const Draw draw = {{p->seed, (u32)step, micro * ROWS, true}};
      const Tally tally = {{micro_rows(all_rows, micro), rates.row_weight * LOSS_SCALE, smoothing, Inputs<Layer0>::targets_at(c, buffer)}};
      auto fetch_next = [&]() {{
        const u32 into = buffer ^ (X_BUFFERS - 1);
        if (!last) fetch(0, micro + 1, into);
        else if (ends && {str(validates).lower()}) {{ {"fetch_check(0, into);" if validates else ""} }}
        else if (step + 1 < p->last_step) fetch(1, 0, into);
      }};
      auto next_inputs = [&]() {{ if (X_BUFFERS == 2) fetch_next(); }};
      constexpr u32 trained = 0;
      {deep.join(forward)}
      leave = c.dead;
      {deep.join(backward)}
      {"__syncthreads();" if len(plan.layers) == 1 else ""}
      if (threadIdx.x == 0) total += sum_of_losses(c);
      buffer ^= X_BUFFERS - 1;
      ++c.passes, ++c.backs;
    }}
    if (c.rank == 0 && threadIdx.x == 0) {{
      loss = total * rates.row_weight;
      p->losses[step - p->first_step] = loss;
      broken |= !(fabsf(loss) <= 3.4028235e38f);
    }}{check}
    ++step, ++c.step, ++ahead;
    if (step % LOT == 0) find_rows(c, step + LOT);
    place = place + 1 == (u32)p->steps_per_epoch ? 0 : place + 1;
    if (leave) break;
  }}
  copies_done();
  __syncthreads();
  {save}
  {"if (c.rank == 0 && threadIdx.x == 0) for (int i = 0; i <= PHASES; ++i) p->stamps[i] = spent[i];" if stamps else ""}
  if (c.rank == 0 && threadIdx.x == 0) {{
    volatile Control* control = p->control;
    control->loss = loss;
    control->correct = load_word(c.shared + AT_CORRECT);
    __threadfence_system();
    control->done = (u32)step;
  }}
  {meet}
}}
"""
