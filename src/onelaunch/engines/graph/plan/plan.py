"""The step of a run as a list of fused kernels, with every buffer they touch: pure arithmetic, no device.

Two shapes of step. A *small* batch is bound by reading and writing the weights: the fp32 masters themselves, or their halves
(kernels/halves.py), which the backward pass reads once for the input gradient and the update together. A *large* one is bound
by its products: GEMMs in their own type, with a copy of the weights that the update keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from onelaunch.device import H200, Chip
from onelaunch.engines.graph.kernels.run_arguments import WIDTH, Tile
from onelaunch.engines.graph.plan.memory import Layout
from onelaunch.engines.graph.plan.narrow import Narrow, narrow_of
from onelaunch.engines.graph.plan.operations import BYTES, Operation, Space, StepPlan
from onelaunch.engines.graph.plan.stages import Stage
from onelaunch.integers import ceil_div, clamp, next_power_of_2
from onelaunch.run.network import Network

SMALL_BATCH = 64
EVALUATION_ROWS = 2048
MOST_COPIED = 2**31  # values of x that are kept in the type of the products as well
ROWS_OF_A_PART = 256  # at least, where a weight gradient is summed in parts


class Planner:
    """Writes down the operations of one network's step."""

    def __init__(self, stages: list[Stage], batch: int, precision: str, states: int, chip: Chip) -> None:
        self.stages, self.batch, self.precision, self.states, self.chip = stages, batch, precision, states, chip
        self.kind = precision if precision in ("bf16", "fp16") else "fp32"
        self.small = batch <= SMALL_BATCH
        self.copies = self.kind != "fp32" and not self.small
        # 10 bytes a weight instead of 12. 784-8192-8192-8192-10 at 32 rows on an H200, µs a step: 418, whole weights 468;
        # without the tensor memory accelerator 563 and 512. Beside optimizer state it gains nothing.
        tiles = chip.tma and all(stage.linear.inputs % 8 == 0 for stage in stages)
        self.halves = self.kind == "bf16" and self.small and len(stages) > 1 and tiles and states == 0
        self.spaces: dict[str, Space] = {}

    # Tiles.

    def skinny(self, inputs: int, outputs: int, rows: int) -> Tile:
        """Whole batch, a few units, deep pipeline: the weights pass by once."""
        m = max(16, next_power_of_2(rows))
        n = clamp(16, next_power_of_2(ceil_div(outputs, self.chip.multiprocessors)), 128)
        # 784 inputs in steps of 256 would be 1024: 8.0 µs at 2048 units on an H200, in steps of 128 6.7.
        widest = 256 if inputs % 256 == 0 else 128
        k = min(next_power_of_2(inputs), widest if n <= 16 else 128 if n <= 64 else 64)
        stage_bytes = n * k * (2 if self.halves else 4) + m * k * BYTES[self.kind]
        return Tile(m, n, max(k, 16), 4, self._depth(stage_bytes, 6))

    def _depth(self, stage_bytes: int, most: int) -> int:
        """Stages of a pipeline that leave a fifth of the shared memory for the rest."""
        return clamp(1, self.chip.shared_bytes * 4 // 5 // stage_bytes, most)

    def strip(self, inputs: int, outputs: int) -> Tile:
        """(batch, columns of the strip, units a step): lines of at least 128 bytes, 16 KiB of weights on their way a program.
        2048 x 2048 at 32 rows on an H200, µs: halves, 64 columns, eight programs a strip 12.8, four 17.4; whole weights, 32
        columns, eight programs 12.4, four 14.6; four without the tensor memory accelerator 17.0, 16 columns 17.2 to 19.7."""
        m = max(16, next_power_of_2(self.batch))
        n = 64 if self.halves else clamp(32, next_power_of_2(ceil_div(inputs, self.chip.multiprocessors)), 64)
        k = clamp(16, next_power_of_2(outputs), 64)
        # The accelerator brings tiles without bank conflicts: whole steps at 2048 in tf32 83 µs instead of 103, but in fp32 348
        # instead of 326, with Adam 125 instead of 120; at 8192 with Adam 1395 instead of 3788.
        gains = self.precision != "fp32" and (n == 64 or self.states == 0)
        tma = self.halves or (gains and self.chip.tma and inputs % 8 == 0 and outputs % 8 == 0)
        a_processor, most = (128 // n, 8) if tma else (2, 4)
        splits = clamp(1, a_processor * self.chip.multiprocessors // ceil_div(inputs, n), most)
        depth = self._depth(n * k * 4 + m * k * BYTES[self.kind], 4)
        return Tile(m, n, k, 4, depth, tma, min(splits, max(1, ceil_div(outputs, k) // 2)))

    def _widest(self) -> int:
        return max(stage.linear.inputs for stage in self.stages[1:])

    def gemm(self, rows: int, columns: int, *, tma: bool) -> Tile:
        """The largest tile of which there are enough to fill the chip."""
        if self.kind == "fp32":
            side = 64 if ceil_div(rows, 64) * ceil_div(columns, 64) >= self.chip.multiprocessors // 2 else 32
            return Tile(side, side, 32, 4, 3)
        for m, n, warps in ((128, 256, 8), (128, 128, 8), (64, 128, 4), (64, 64, 4)):
            depth = self._depth((m + n) * 64 * 2, 4 if m * n <= 128 * 128 else 3)
            if ceil_div(rows, m) * ceil_div(columns, n) >= self.chip.multiprocessors * 0.7 and depth >= 3:
                return Tile(m, n, 64, warps, depth, tma)
        return Tile(clamp(16, next_power_of_2(rows), 32), clamp(16, next_power_of_2(columns), 128), 64, 4, 4)

    def aligned(self, *widths: int) -> bool:
        """Whether rows of these widths start on 16 bytes, which the tensor memory accelerator wants."""
        return self.chip.tma and self.kind != "fp32" and all(w * BYTES[self.kind] % 16 == 0 for w in widths)

    # Operations.

    def space(self, name: str, *shape: int, kind: str | None = None) -> str:
        self.spaces[name] = Space(shape, kind or self.kind)
        return name

    def forward(self, rows: int, prefix: str, *, training: bool) -> list[Operation]:
        """The hidden stages over `rows` rows; `prefix` tells training's buffers from evaluation's."""
        operations = []
        gathers, rounded = rows > SMALL_BATCH, self.copies or self.halves
        if gathers:
            into = self.space(f"{prefix}x", rows, self.stages[0].linear.inputs)
            operations.append(Operation("gather", 0, (into,), Tile(1, 1, 1)))
        source = (f"{prefix}x",) if gathers else ()
        for number, stage in enumerate(self.stages[:-1]):
            linear = stage.linear
            made = [self.space(f"{prefix}h{number}", rows, linear.outputs)]
            if training and stage.from_z:
                made.append(self.space(f"{prefix}z{number}", rows, linear.outputs))
            if rows <= SMALL_BATCH:
                tile = self.skinny(linear.inputs, linear.outputs, rows)
            else:
                tma = rounded and not (training and stage.p) and self.aligned(linear.inputs, linear.outputs)
                tile = self.gemm(rows, linear.outputs, tma=tma)
            operations.append(Operation("forward", number, (*source, *made), tile))
            source = (f"{prefix}h{number}",)
        return operations

    def output(self, rows: int, prefix: str, *, training: bool) -> Operation:
        last = self.stages[-1].linear
        width = max(16, next_power_of_2(last.outputs))
        single = rows <= SMALL_BATCH
        m = 1 if single else 32 if width <= 256 else 16
        k = clamp(16, min(next_power_of_2(last.inputs), 8192 // width), 256)
        stage_bytes = (m + width) * k * BYTES[self.kind]
        tile = Tile(m, width, k, 4 if m * width <= 4096 else 8, clamp(1, self.chip.shared_bytes // stage_bytes, 3))
        programs = ceil_div(rows, m)
        hidden = len(self.stages) > 1
        uses = [self.space(f"{prefix}gradient", rows, last.outputs)]
        uses.append(self.space(f"{prefix}loss_parts", programs, kind="fp32"))
        if hidden:
            uses.append(f"{prefix}h{len(self.stages) - 2}")
        elif rows > SMALL_BATCH:
            uses.append(f"{prefix}x")
        if training and hidden:
            uses.append(self.space(f"dz{len(self.stages) - 2}", rows, last.inputs))
            if self.stages[-2].from_z:
                uses.append(f"z{len(self.stages) - 2}")
            if single:
                uses.append(self.space("gathered", rows, self.stages[0].linear.inputs))
        if training and not self.small:
            uses.append(self.space(f"sums{len(self.stages) - 1}", programs, last.outputs, kind="fp32"))
            if hidden:
                uses.append(self.space(f"sums{len(self.stages) - 2}", programs, last.inputs, kind="fp32"))
        return Operation("output_row" if single else "output", len(self.stages) - 1, tuple(uses), tile)

    def backward(self) -> list[Operation]:
        operations: list[Operation] = []
        last = len(self.stages) - 1
        if last > 0 and not self.small:
            operations += self.update(last)
        for number in range(last - 1, 0, -1):
            before = self.stages[number - 1]
            linear = self.stages[number].linear
            into = self.space(f"dz{number - 1}", self.batch, linear.inputs)
            uses = [f"dz{number}", f"h{number - 1}", into, *([f"z{number - 1}"] if before.from_z else [])]
            if self.small:
                tile = self.strip(linear.inputs, linear.outputs)
                if tile.splits > 1:
                    uses.append(self.space("shares", tile.splits, self.batch, self._widest(), kind="fp32"))
                    uses.append(self.space(f"tickets.{number}", ceil_div(linear.inputs, tile.n), kind="int64"))
                operations.append(Operation("strip", number, tuple(uses), tile))
                continue
            tma = self.copies and self.aligned(linear.inputs, linear.outputs)
            tile = self.gemm(self.batch, linear.inputs, tma=tma)
            uses.append(self.space(f"sums{number - 1}", ceil_div(self.batch, tile.m), linear.inputs, kind="fp32"))
            operations += [Operation("input_gradient", number, tuple(uses), tile), *self.update(number)]
        if self.small and last > 0:
            ends = ("gradient", f"h{last - 1}", "dz0", "gathered", "loss_parts", "losses")
            return [*operations, Operation("ends_update", 0, ends, self.update(0)[0].tile)]
        return operations + self.update(0)

    def update(self, number: int) -> list[Operation]:
        """The weights' step in one kernel; or, where W has too few tiles for the chip, in parts of the batch and their sum."""
        linear = self.stages[number].linear
        gradient = "gradient" if number == len(self.stages) - 1 else f"dz{number}"
        source = [f"h{number - 1}"] if number else [] if self.small else ["x"]
        finish = [] if self.small else [f"sums{number}"]
        finish += ["loss_parts", "losses"] if number == 0 else []
        if self.small:
            m = max(16, next_power_of_2(self.batch))
            # Halves of 2048 x 784 in tiles of 32 units: 50.7 instead of 52.6 µs a step. Of 8192 x 784: 423.9 instead of 418.5.
            few = (
                self.halves
                and ceil_div(linear.outputs, 64) * ceil_div(linear.inputs, 64) < 4 * self.chip.multiprocessors
            )
            units = clamp(16, next_power_of_2(linear.outputs), 32 if few else 64)
            tile = Tile(units, clamp(16, next_power_of_2(linear.inputs), 64), m, 4, 2)
            return [Operation("update", number, (gradient, *source, *finish), tile)]
        tile = self.gemm(linear.outputs, linear.inputs, tma=self.aligned(linear.inputs, linear.outputs))
        tiles = ceil_div(linear.outputs, tile.m) * ceil_div(linear.inputs, tile.n)
        splits = min(ceil_div(self.batch, ROWS_OF_A_PART), 2 * self.chip.multiprocessors // tiles)
        if splits <= 2:
            return [Operation("update", number, (gradient, *source, *finish), tile)]
        parts = self.space(f"parts{number}", splits, linear.outputs * linear.inputs, kind="fp32")
        return [
            Operation("products", number, (gradient, *source, parts), tile),
            Operation("parts_update", number, (parts, *finish), tile),
        ]


def plan_step(
    stages: list[Stage], *, batch: int, rows: int, steps_per_epoch: int, precision: str, check_rows: int, states: int,
    images: bool = False, chip: Chip = H200,
) -> StepPlan:  # fmt: skip
    """The step and the evaluation of a run on `rows` rows; `states` tensors an optimizer keeps for each parameter. `images`: x
    is uint8."""
    planner = Planner(stages, batch, precision, states, chip)
    part = min(max(EVALUATION_ROWS, batch), max(check_rows, SMALL_BATCH + 1)) if check_rows else 0
    narrow = narrow_of(stages, batch, planner.kind)
    if narrow:
        planner.copies = planner.halves = False  # evaluation reads the masters
    kept = [*_clock(planner, rows, steps_per_epoch), *_clock_of_check(planner, check_rows, part)]
    if planner.kind != "fp32" and not images and rows * stages[0].linear.inputs <= MOST_COPIED:
        # The products round x anyway: once, before the first step, it halves what every step gathers.
        kept.append(planner.space("data", rows, stages[0].linear.inputs))
    if narrow:
        operations, more = _narrow_operations(planner, narrow)
        kept += more
    else:
        kept += _kept(planner)
        operations = planner.forward(batch, "", training=True)
        operations.append(planner.output(batch, "", training=True))
        operations += planner.backward()
    evaluation: list[Operation] = []
    if part:
        evaluation = planner.forward(part, "check.", training=False)
        evaluation.append(planner.output(part, "check.", training=False))
    kept += [name for name in planner.spaces if name.startswith("tickets.")]
    return StepPlan(
        tuple(operations), tuple(evaluation), planner.spaces, frozenset(kept), planner.small, part, narrow
    )  # fmt: skip


def _narrow_operations(planner: Planner, narrow: Narrow) -> tuple[list[Operation], list[str]]:
    space, tile = planner.space, Tile(narrow.rows, 1, 1, narrow.warps)
    programs = min(ceil_div(planner.batch, narrow.rows), 2 * planner.chip.multiprocessors)
    parts = [space("parts", programs, narrow.total, kind="fp32"), space("loss_parts", programs, kind="fp32")]
    kept = [space("packed", narrow.total, kind="fp32")]
    kept += [space("packed_copy", narrow.total)] if planner.kind != "fp32" else []
    kept += [space(f"state{state}.packed", narrow.total, kind="fp32") for state in range(planner.states)]
    return [
        Operation("narrow_step", 0, (*parts, *kept), tile),
        Operation("narrow_update", 0, (*parts, *kept, "losses"), tile),
    ], kept


def _clock(planner: Planner, rows: int, steps_per_epoch: int) -> Iterable[str]:
    """What the kernels read of the run, and where they leave its losses."""
    yield planner.space("control", 4, kind="int64")
    yield planner.space("table", steps_per_epoch + 1, WIDTH, kind="fp32")
    yield planner.space("keys", 8, kind="int64")
    yield planner.space("order", rows, kind="int32")
    yield planner.space("losses", steps_per_epoch, kind="fp32")


def _clock_of_check(planner: Planner, rows: int, part: int) -> Iterable[str]:
    if rows:
        yield planner.space("check.control", 4, kind="int64")
        yield planner.space("check.order", rows, kind="int32")
        yield planner.space("check.table", ceil_div(rows, part) + 1, WIDTH, kind="fp32")
        yield planner.space("check.losses", ceil_div(rows, part), kind="fp32")


def _kept(planner: Planner) -> Iterable[str]:
    """The optimizer's state, and the weights' halves or copies."""
    for number, stage in enumerate(planner.stages):
        linear = stage.linear
        for state in range(planner.states):
            yield planner.space(f"state{state}.{number}.weight", linear.outputs, linear.inputs, kind="fp32")
            if linear.bias:
                yield planner.space(f"state{state}.{number}.bias", linear.outputs, kind="fp32")
        if planner.halves:
            yield planner.space(f"high.{number}", linear.outputs, linear.inputs, kind="bf16")
            yield planner.space(f"low.{number}", linear.outputs, linear.inputs, kind="int16")
        if planner.copies:
            yield planner.space(f"copy.{number}", linear.outputs, linear.inputs)


def describe(network: Network, step: StepPlan, precision: str, layout: Layout) -> str:
    kinds = ", ".join(str(operation) for operation in step.operations)
    way = (
        "all weights on chip during a tile of rows" if step.narrow
        else "weights in halves of 16 bits" if "high.0" in step.spaces
        else "masters read in place" if step.small
        else "products on copies of the weights"
    )  # fmt: skip
    return f"{network} in {precision}: {len(step.operations)} kernels a step ({kinds}); {way}; {layout}"
