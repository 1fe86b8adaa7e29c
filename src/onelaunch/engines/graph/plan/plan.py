"""The step of a run as a list of fused kernels, with every buffer they use: pure arithmetic, no device.

There are two shapes of step. A *small* batch is bound by reading and writing the weights: the fp32 masters themselves, or
their two 16-bit words (kernels/split_weights.py). The backward pass reads them once for the input gradient and the update
together. A *large* batch is bound by its products: GEMMs in the dtype of the products, on a copy of the weights that the update
maintains. Where the run clips gradients, the same kernels store them, and the update comes last (kernels/clip.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from onelaunch.device import H200, Chip
from onelaunch.engines.graph.kernels.run_arguments import CONTROL_SIZE, TABLE_WIDTH, backward_programs, square_programs
from onelaunch.engines.graph.plan.gradients import gradient_offsets, parameters_of
from onelaunch.engines.graph.plan.memory import Layout
from onelaunch.engines.graph.plan.narrow import Narrow, plan_narrow
from onelaunch.engines.graph.plan.operations import BYTES, VALIDATION, BufferSpec, Operation, StepPlan
from onelaunch.engines.graph.plan.stages import MIDDLE, Segment, Stage, product_name, source_name
from onelaunch.integers import ceil_div, clamp, next_power_of_2
from onelaunch.kernels.gemm_tile import GemmTile
from onelaunch.run.network import Network

SMALL_BATCH = 64
EVALUATION_ROWS = 2048
MAX_COPIED_VALUES = 2**31  # of x, kept in the dtype of the products as well
MIN_ROWS_PER_SPLIT = 256  # of a split-K weight gradient


class Planner:
    """Collects the operations and buffers of one network's step."""

    def __init__(
        self, stages: list[Stage], batch: int, precision: str, states: int, chip: Chip, *, clips: bool
    ) -> None:  # fmt: skip
        self.stages, self.batch, self.precision, self.states, self.chip = stages, batch, precision, states, chip
        self.dtype = precision if precision in ("bf16", "fp16") else "fp32"
        self.small = batch <= SMALL_BATCH
        self.copies = self.dtype != "fp32" and not self.small
        # Split weights move 10 bytes per weight instead of 12. 784-8192-8192-8192-10 at 32 rows on an H200 takes 418 µs per
        # step, with whole weights 468; without the tensor memory accelerator (TMA) 563 and 512. With optimizer states they gain
        # nothing.
        tiles = chip.tma and all(stage.linear.inputs % 8 == 0 for stage in stages)
        pays = states == 0 and not clips
        self.split_weights = self.dtype == "bf16" and self.small and len(stages) > 1 and tiles and pays
        self.buffers: dict[str, BufferSpec] = {}

    def skinny(self, inputs: int, outputs: int, rows: int) -> GemmTile:
        """The whole batch, a few units and a deep pipeline: the weights are read once."""
        m = max(16, next_power_of_2(rows))
        n = clamp(16, next_power_of_2(ceil_div(outputs, self.chip.multiprocessors)), 128)
        # 784 inputs in tiles of 256 are padded to 1024: 8.0 µs at 2048 units on an H200, in tiles of 128 6.7 µs.
        widest = 256 if inputs % 256 == 0 else 128
        k = min(next_power_of_2(inputs), widest if n <= 16 else 128 if n <= 64 else 64)
        stage_bytes = n * k * (2 if self.split_weights else 4) + m * k * BYTES[self.dtype]
        return GemmTile(m, n, max(k, 16), 4, self._depth(stage_bytes, 6))

    def _depth(self, stage_bytes: int, maximum: int) -> int:
        """The number of pipeline stages, up to `maximum`, that leave a fifth of the shared memory for the rest."""
        return clamp(1, self.chip.shared_bytes * 4 // 5 // stage_bytes, maximum)

    def fused_backward(self, inputs: int, outputs: int) -> GemmTile:
        """(batch, columns of a strip, units per iteration): lines of at least 128 bytes, 16 KiB of weights in flight.

        2048 x 2048 at 32 rows on an H200, in µs. Split weights, 64 columns: eight programs per strip 12.8, four 17.4. Whole
        weights, 32 columns: eight programs 12.4, four 14.6. Four without TMA: 17.0; with 16 columns 17.2 to 19.7.
        """
        m = max(16, next_power_of_2(self.batch))
        n = 64 if self.split_weights else clamp(32, next_power_of_2(ceil_div(inputs, self.chip.multiprocessors)), 64)
        k = clamp(16, next_power_of_2(outputs), 64)
        # TMA loads tiles without bank conflicts. Whole steps at 2048 take 83 µs instead of 103 in tf32, but 348 instead of 326
        # in fp32, and 125 instead of 120 with Adam; at 8192 with Adam 1395 instead of 3788.
        gains = self.precision != "fp32" and (n == 64 or self.states == 0)
        tma = self.split_weights or (gains and self.chip.tma and inputs % 8 == 0 and outputs % 8 == 0)
        per_multiprocessor, max_splits = (128 // n, 8) if tma else (2, 4)
        splits = clamp(1, per_multiprocessor * self.chip.multiprocessors // ceil_div(inputs, n), max_splits)
        splits = min(splits, max(1, ceil_div(outputs, k) // 2))
        depth = self._depth(n * k * 4 + m * k * BYTES[self.dtype], 4)
        return GemmTile(m, n, k, 4, depth, tma, splits=splits)

    def gemm(self, rows: int, columns: int, *, tma: bool) -> GemmTile:
        """The largest tile that still gives enough tiles to fill the chip."""
        if self.dtype == "fp32":
            side = 64 if ceil_div(rows, 64) * ceil_div(columns, 64) >= self.chip.multiprocessors // 2 else 32
            return GemmTile(side, side, 32, 4, 3)
        for m, n, warps in ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4)):
            depth = self._depth((m + n) * 64 * 2, 4 if m * n <= 128 * 128 else 3)
            if ceil_div(rows, m) * ceil_div(columns, n) >= self.chip.multiprocessors * 0.7 and depth >= 3:
                return GemmTile(m, n, 64, warps, depth, tma)
        return GemmTile(clamp(16, next_power_of_2(rows), 32), clamp(16, next_power_of_2(columns), 128), 64, 4, 4)

    def aligned(self, *widths: int) -> bool:
        """Whether rows of these widths start at multiples of 16 bytes, which TMA requires."""
        return self.chip.tma and self.dtype != "fp32" and all(w * BYTES[self.dtype] % 16 == 0 for w in widths)

    def buffer(self, name: str, *shape: int, dtype: str | None = None) -> str:
        """Adds a buffer, by default in the dtype of the products, and returns its name."""
        self.buffers[name] = BufferSpec(shape, dtype or self.dtype)
        return name

    def forward(self, rows: int, prefix: str, *, training: bool) -> list[Operation]:
        """The hidden stages over `rows` rows; `prefix` distinguishes the buffers of training and evaluation."""
        operations = []
        gathers, rounded = rows > SMALL_BATCH, self.copies or self.split_weights
        if gathers:
            into = self.buffer(f"{prefix}x", rows, self.stages[0].linear.inputs)
            operations.append(Operation("gather", 0, (into,), GemmTile(1, 1, 1)))
        source = (f"{prefix}x",) if gathers else ()
        for number, stage in enumerate(self.stages[:-1]):
            linear = stage.linear
            made = [self.buffer(f"{prefix}{product_name(self.stages, number)}", rows, linear.outputs)]
            if training and stage.saves_input:
                made.append(self.buffer(f"{prefix}z{number}", rows, linear.outputs))
            if rows <= SMALL_BATCH:
                tile = self.skinny(linear.inputs, linear.outputs, rows)
            else:
                tma = rounded and not (training and stage.p) and self.aligned(linear.inputs, linear.outputs)
                tile = self.gemm(rows, linear.outputs, tma=tma)
            operations.append(Operation("forward", number, (*source, *made), tile))
            if stage.segment and not stage.segment.is_empty:
                operations.append(self.segment(number, stage.segment, rows, prefix))
            source = (f"{prefix}h{number}",)
        return operations

    def segment(self, number: int, segment: Segment, rows: int, prefix: str) -> Operation:
        width = self.stages[number].linear.outputs
        uses = [f"{prefix}p{number}", self.buffer(f"{prefix}h{number}", rows, width)]
        uses += [f"{prefix}{source_name(self.stages, source)}" for source in (segment.before, segment.after) if source]
        if segment.before and MIDDLE in self.stages[number].taps:
            uses.append(self.buffer(f"{prefix}middle{number}", rows, width))
        return Operation("segment", number, tuple(uses), GemmTile(1, 1, 1))

    def segment_backward(self, number: int) -> list[Operation]:
        """From the gradient of a stage's output to that of its Linear's, where the stage has a segment."""
        stage = self.stages[number]
        segment, width = stage.segment, stage.linear.outputs
        if segment is None:
            return []
        uses = [f"dh{number}", product_name(self.stages, number), self.buffer(f"dz{number}", self.batch, width)]
        uses += [f"z{number}"] if stage.saves_input else []
        uses += [f"skip.{point}{number}" for point in sorted(stage.taps)]
        uses += [source_name(self.stages, segment.before)] if segment.before else []
        for source in filter(None, (segment.before, segment.after)):
            uses.append(self.buffer(f"skip.{source.point}{source.stage}", self.batch, width, dtype="fp32"))
        if segment.norm and (segment.norm.scale or segment.norm.shift):
            programs = backward_programs(self.batch, width)
            uses.append(self.buffer(f"norm_parts{number}", programs, 2, width, dtype="fp32"))
            uses.append(self.buffer(f"tickets.norm{number}", 1, dtype="int64"))
        return [Operation("segment_backward", number, tuple(uses), GemmTile(1, 1, 1))]

    def gradient_of(self, number: int, rows: int) -> str:
        """The buffer into which the gradient of a stage's input goes: dz of the stage before, or dh if that has a segment."""
        width = self.stages[number].linear.inputs
        if self.stages[number - 1].segment:
            return self.buffer(f"dh{number - 1}", rows, width, dtype="fp32")
        return self.buffer(f"dz{number - 1}", rows, width)

    def output(self, rows: int, prefix: str, *, training: bool) -> Operation:
        last = self.stages[-1].linear
        width = max(16, next_power_of_2(last.outputs))
        single = rows <= SMALL_BATCH
        m = 1 if single else 32 if width <= 256 else 16
        k = clamp(16, min(next_power_of_2(last.inputs), 8192 // width), 256)
        stage_bytes = (m + width) * k * BYTES[self.dtype]
        tile = GemmTile(m, width, k, 4 if m * width <= 4096 else 8, clamp(1, self.chip.shared_bytes // stage_bytes, 3))
        programs = ceil_div(rows, m)
        hidden = len(self.stages) > 1
        uses = [self.buffer(f"{prefix}gradient", rows, last.outputs)]
        uses.append(self.buffer(f"{prefix}loss_parts", programs, dtype="fp32"))
        if hidden:
            uses.append(f"{prefix}h{len(self.stages) - 2}")
        elif rows > SMALL_BATCH:
            uses.append(f"{prefix}x")
        if training and hidden:
            uses.append(self.gradient_of(len(self.stages) - 1, rows))
            if self.stages[-2].saves_input and not self.stages[-2].segment:
                uses.append(f"z{len(self.stages) - 2}")
            if single:
                uses.append(self.buffer("gathered", rows, self.stages[0].linear.inputs))
        if training and not self.small:
            uses.append(self.buffer(f"sums{len(self.stages) - 1}", programs, last.outputs, dtype="fp32"))
            if hidden and not self.stages[-2].segment:
                uses.append(self.buffer(f"sums{len(self.stages) - 2}", programs, last.inputs, dtype="fp32"))
        return Operation("output_small_batch" if single else "output", len(self.stages) - 1, tuple(uses), tile)

    def backward(self) -> list[Operation]:
        operations: list[Operation] = []
        last = len(self.stages) - 1
        if last > 0 and not self.small:
            operations += self.update(last)
        if last > 0:
            operations += self.segment_backward(last - 1)
        for number in range(last - 1, 0, -1):
            before = self.stages[number - 1]
            linear = self.stages[number].linear
            into = self.gradient_of(number, self.batch)
            saved = before.saves_input and not before.segment
            uses = [f"dz{number}", f"h{number - 1}", into, *([f"z{number - 1}"] if saved else [])]
            if self.small:
                tile = self.fused_backward(linear.inputs, linear.outputs)
                if tile.splits > 1:
                    uses.append(
                        self.buffer(
                            "partial_dx",
                            tile.splits,
                            self.batch,
                            max(stage.linear.inputs for stage in self.stages[1:]),
                            dtype="fp32",
                        )
                    )
                    uses.append(self.buffer(f"tickets.{number}", ceil_div(linear.inputs, tile.n), dtype="int64"))
                operations.append(Operation("fused_backward", number, tuple(uses), tile))
                operations += self.segment_backward(number - 1)
                continue
            tma = self.copies and self.aligned(linear.inputs, linear.outputs)
            tile = self.gemm(self.batch, linear.inputs, tma=tma)
            if not before.segment:
                uses.append(self.buffer(f"sums{number - 1}", ceil_div(self.batch, tile.m), linear.inputs, dtype="fp32"))
            operations += [Operation("input_gradient", number, tuple(uses), tile), *self.update(number)]
            operations += self.segment_backward(number - 1)
        if self.small and last > 0:
            uses = ["gradient", f"h{last - 1}", "dz0", "gathered", "loss_parts", "losses"]
            return [*operations, Operation("first_and_last_update", 0, tuple(uses), self.update(0)[0].tile)]
        return operations + self.update(0)

    def update(self, number: int) -> list[Operation]:
        """The weight update in one kernel; where W has too few tiles to fill the chip, as a split-K product and its sum."""
        linear = self.stages[number].linear
        gradient = "gradient" if number == len(self.stages) - 1 else f"dz{number}"
        source = [f"h{number - 1}"] if number else [] if self.small else ["x"]
        finish = [] if self.small or self.stages[number].segment else [f"sums{number}"]
        finish += ["loss_parts", "losses"] if number == 0 else []
        if self.small:
            m = max(16, next_power_of_2(self.batch))
            # Split weights, tiles of 32 units: 50.7 µs per step instead of 52.6 at 2048 x 784; at 8192 x 784 423.9, not 418.5.
            tiles = ceil_div(linear.outputs, 64) * ceil_div(linear.inputs, 64)
            few = self.split_weights and tiles < 4 * self.chip.multiprocessors
            units = clamp(16, next_power_of_2(linear.outputs), 32 if few else 64)
            tile = GemmTile(units, clamp(16, next_power_of_2(linear.inputs), 64), m, 4, 2)
            return [Operation("update", number, (gradient, *source, *finish), tile)]
        tile = self.gemm(linear.outputs, linear.inputs, tma=self.aligned(linear.inputs, linear.outputs))
        tiles = ceil_div(linear.outputs, tile.m) * ceil_div(linear.inputs, tile.n)
        splits = min(ceil_div(self.batch, MIN_ROWS_PER_SPLIT), 2 * self.chip.multiprocessors // tiles)
        if splits <= 2 or self.stages[number].segment:  # without sums, only this kernel computes the bias's gradient
            return [Operation("update", number, (gradient, *source, *finish), tile)]
        parts = self.buffer(f"parts{number}", splits, linear.outputs * linear.inputs, dtype="fp32")
        return [
            Operation("partial_products", number, (gradient, *source, parts), tile),
            Operation("split_k_update", number, (parts, *finish), tile),
        ]


def plan_step(
    stages: list[Stage], *, batch: int, rows: int, steps_per_epoch: int, precision: str, validation_rows: int, states: int,
    uint8_rows: bool = False, clips: bool = False, chip: Chip = H200,
) -> StepPlan:  # fmt: skip
    """The step and the evaluation of a run on `rows` rows, with an optimizer that keeps `states` tensors per parameter.

    `uint8_rows`: x is uint8. `clips`: the update waits for the norm of all gradients.
    """
    planner = Planner(stages, batch, precision, states, chip, clips=clips)
    validation_batch = min(max(EVALUATION_ROWS, batch), max(validation_rows, SMALL_BATCH + 1)) if validation_rows else 0
    narrow = plan_narrow(stages, batch, planner.dtype)
    if narrow:
        planner.copies = planner.split_weights = False  # evaluation reads the masters
    persistent = [*_position(planner, "", rows, steps_per_epoch), planner.buffer("keys", 8, dtype="int64")]
    if validation_rows:
        persistent += _position(planner, VALIDATION, validation_rows, ceil_div(validation_rows, validation_batch))
    if planner.dtype != "fp32" and not uint8_rows and rows * stages[0].linear.inputs <= MAX_COPIED_VALUES:
        # The products round x anyway. Rounding once, before the first step, halves the bytes that every step gathers.
        persistent.append(planner.buffer("data", rows, stages[0].linear.inputs))
    if narrow:
        operations, more = _narrow_operations(planner, narrow)
        persistent += more
    else:
        persistent += _states_and_weights(planner)
        operations = planner.forward(batch, "", training=True)
        operations.append(planner.output(batch, "", training=True))
        operations += planner.backward()
    if clips:
        clipping, more = _clipping_operations(planner, narrow)
        operations += clipping
        persistent += more
    evaluation: list[Operation] = []
    if validation_rows:
        evaluation = planner.forward(validation_batch, VALIDATION, training=False)
        evaluation.append(planner.output(validation_batch, VALIDATION, training=False))
    persistent += [name for name in planner.buffers if name.startswith("tickets.")]
    return StepPlan(
        tuple(operations), tuple(evaluation), planner.buffers, frozenset(persistent), planner.small, validation_batch, narrow
    )  # fmt: skip


def _narrow_operations(planner: Planner, narrow: Narrow) -> tuple[list[Operation], list[str]]:
    buffer, tile = planner.buffer, GemmTile(narrow.rows, 1, 1, narrow.warps)
    programs = min(ceil_div(planner.batch, narrow.rows), 2 * planner.chip.multiprocessors)
    parts = [buffer("parts", programs, narrow.total, dtype="fp32"), buffer("loss_parts", programs, dtype="fp32")]
    persistent = [buffer("packed", narrow.total, dtype="fp32")]
    persistent += [buffer("packed_copy", narrow.total)] if planner.dtype != "fp32" else []
    persistent += [buffer(f"state{state}.packed", narrow.total, dtype="fp32") for state in range(planner.states)]
    return [
        Operation("narrow_step", 0, (*parts, *persistent), tile),
        Operation("narrow_update", 0, (*parts, *persistent, "losses"), tile),
    ], persistent


def _clipping_operations(planner: Planner, narrow: Narrow | None) -> tuple[list[Operation], list[str]]:
    """The norm of all gradients, and the updates."""
    buffer, tile = planner.buffer, GemmTile(1, 1, 1)
    count = narrow.total if narrow else gradient_offsets(planner.stages)[1]
    buffer("tickets.clip", 1, dtype="int64")
    persistent = [buffer("gradients", count, dtype="fp32")]
    factor = buffer("clip_factor", 1, dtype="fp32")
    squares = buffer("squares", square_programs(count), dtype="fp32")
    operations = [Operation("clip_factor", 0, ("gradients", squares, "tickets.clip", factor), tile)]
    for number in range(1 if narrow else len(planner.stages)):
        operations.append(Operation("clipped_update", number, (factor,), tile))
        segment = planner.stages[number].segment
        if segment and segment.norm and (segment.norm.scale or segment.norm.shift):
            operations.append(Operation("clipped_norm_update", number, (factor,), tile))
    return operations, persistent


def _position(planner: Planner, prefix: str, rows: int, steps: int) -> Iterable[str]:
    """What the kernels read about the run (see kernels/run_state.py), and where they store the losses of `steps` steps."""
    yield planner.buffer(f"{prefix}control", CONTROL_SIZE, dtype="int64")
    yield planner.buffer(f"{prefix}table", steps + 1, TABLE_WIDTH, dtype="fp32")
    yield planner.buffer(f"{prefix}order", rows, dtype="int32")
    yield planner.buffer(f"{prefix}losses", steps, dtype="fp32")


def _states_and_weights(planner: Planner) -> Iterable[str]:
    """The optimizer's states, and the split weights or the copies of the weights."""
    for number, part, shape in parameters_of(planner.stages):
        for state in range(planner.states):
            yield planner.buffer(f"state{state}.{number}.{part}", *shape, dtype="fp32")
    for number, stage in enumerate(planner.stages):
        linear = stage.linear
        if planner.split_weights:
            yield planner.buffer(f"high.{number}", linear.outputs, linear.inputs, dtype="bf16")
            yield planner.buffer(f"low.{number}", linear.outputs, linear.inputs, dtype="int16")
        if planner.copies:
            yield planner.buffer(f"copy.{number}", linear.outputs, linear.inputs)


def describe(network: Network, step: StepPlan, precision: str, layout: Layout) -> str:
    kinds = ", ".join(str(operation) for operation in step.operations)
    way = (
        "all weights on chip while a tile of rows is processed" if step.narrow
        else "weights split into two 16-bit words" if "high.0" in step.buffers
        else "masters read in place" if step.small
        else "products on copies of the weights"
    )  # fmt: skip
    return f"{network} in {precision}: {len(step.operations)} kernels per step ({kinds}); {way}; {layout}"
