"""The plan of a run on the CPU: the layout of the arena, and the work of each partition. Pure: no LLVM, no torch.

Layouts (a *panel* is a group of columns two vectors wide; the last may be one vector wide):
  weights        one panel after another, `[inputs][panel width]` inside: one layout serves all three products
  activations    `[batch][pitch]`, the pitch an odd number of cache lines, so that a column does not fall into one cache set
  gradients dZ   twice: in panels `[panel][batch][width]` (for dW) and transposed `[batch panel][units][width]` (for dX)
Only the vector dimension is ever padded. Products run over the exact number of inputs and rows, so the contents of the
padding never reach a result.

Partitions. The work of a step is split into `partitions`. Partition t owns whole panels of every stage: their forward, their
part of dX, their dW and the update. The last layer is owned by input rows instead, and its forward is split by batch rows,
so that loss and gradient need no exchange. Where `divides_rows` (rows.py) says so, partition t takes its rows of the batch
through all stages instead, and stores a gradient of all parameters of its own. Results depend on the number of partitions,
not on the number of threads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

from onelaunch.engines.cpu.plan.rows import divides_rows, split, split_rows
from onelaunch.engines.cpu.plan.settings import CALL, CONTROL, HYPERPARAMETERS, SCALARS, TALLY, Settings
from onelaunch.engines.cpu.plan.stages import Add, Stage, stages_of
from onelaunch.engines.cpu.plan.target import CACHE_LINE, Target
from onelaunch.integers import ceil_div, round_up
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.network import Activation, BatchNorm, LayerNorm, tensor_name

# Products in tiles: layers at least so wide, and batches at least so large, by planes: with two and batch 32, packing takes
# longer than AVX-512 (784-128-128-128-10: 126 µs per step against 119). TERMS is the length of a step.
MIN_TILE_WIDTH, MIN_TILE_BATCH, TERMS = 64, {1: 16, 2: 64}, 32
MAX_CALL_STEPS = 4096  # steps per native call: the length of the loss and scalar buffers
MAX_PROFILED_PHASES = 128
# Up to this many partitions, each gathers the whole batch for itself. The rows then never travel between cores (the first
# forward of 784-128-128-128-10, batch 32, two threads: 28 -> 18 µs), and a step needs no barrier at its end.
MAX_PRIVATE_INPUTS = 4


class Panel(NamedTuple):
    first: int  # column
    width: int


@functools.cache
def _panels(columns: int, width: int) -> tuple[Panel, ...]:
    return tuple(Panel(first, min(width, columns - first)) for first in range(0, columns, width))


class Buffer(NamedTuple):
    name: str
    offset: int  # bytes from the arena's start
    size: int  # bytes


class Parameter(NamedTuple):
    """Where a tensor of the model's state_dict is stored."""

    name: str
    buffer: str
    inputs: int  # 0: a vector
    outputs: int
    trained: bool


@dataclass
class Plan:
    settings: Settings
    target: Target
    stages: tuple[Stage, ...] = ()
    buffers: dict[str, Buffer] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)
    state_stride: int = 0  # bytes from a parameter to its first optimizer state, and from one state to the next
    size: int = 0

    def __post_init__(self) -> None:
        self.stages = stages_of(self.settings.network)
        self.batch, self.partitions, self.lanes = self.settings.batch, self.settings.partitions, self.target.lanes
        self.panel_width = 2 * self.lanes
        self.rows = round_up(self.batch, self.lanes)
        self.by_rows = divides_rows(self.settings, self.panel_width)  # each partition has its rows in all stages
        self._lay_out()

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def padded(self, stage: Stage) -> int:
        return round_up(stage.width, self.lanes)

    def pitch(self, stage: Stage) -> int:
        """Floats from one row of activations to the next: an odd number of cache lines."""
        line = max(CACHE_LINE // 4, self.lanes)
        return (round_up(stage.width, line) // line | 1) * line

    def panels_of(self, columns: int) -> list[Panel]:
        return list(_panels(columns, self.panel_width))

    def panels(self, stage: Stage) -> list[Panel]:
        return self.panels_of(self.padded(stage))

    def batch_panels(self) -> list[Panel]:
        return self.panels_of(self.rows)

    def owned_batch_panels(self, partition: int) -> list[Panel]:
        """The batch panels whose dX a partition computes: those of its rows, or all of them (for its columns)."""
        if not self.by_rows:
            return self.batch_panels()
        first, last = self.owned_rows(partition, self.rows)
        return [panel for panel in self.batch_panels() if first <= panel.first < last]

    def owned_panels(self, stage: Stage, partition: int) -> list[Panel]:
        panels = self.panels(stage)
        first, last = split(len(panels), self.partitions, partition)
        return panels[first:last]

    def owned_columns(self, stage: Stage, partition: int) -> tuple[int, int]:
        """Half-open range of a stage's units (without padding) that a partition owns."""
        owned = self.owned_panels(stage, partition)
        if not owned:
            return 0, 0
        return owned[0].first, min(owned[-1].first + owned[-1].width, stage.width)

    def owned_rows(self, partition: int, rows: int) -> tuple[int, int]:
        """Half-open range of a batch of `rows` for work split by rows: whole blocks of `lanes`, for the transposes, or whole
        batch panels, for dX."""
        return split_rows(rows, self.panel_width if self.by_rows else self.lanes, self.partitions, partition)

    @property
    def private_input(self) -> bool:
        """Whether every partition gathers its own copy of the batch."""
        return self.partitions <= MAX_PRIVATE_INPUTS and self.stages[0].is_plain and not self.by_rows

    @property
    def steps_overlap(self) -> bool:
        """Whether a partition may begin the next step while others finish this one.

        Its first phase then reads only what it wrote itself (input, own columns of the weights). It writes only its own
        columns of the first activations, which others read for the last time before the step's last barrier.
        """
        first = self.stages[1]
        alone = self.private_input and first is not self.last and not self.forward_by_rows(first)
        return alone and not self.settings.clips  # whose update is split in another way

    def forward_by_rows(self, stage: Stage, *, statistics: bool = True) -> bool:
        """Whether a stage's forward is split by batch rows; otherwise by columns.

        Batch statistics need whole columns, and a LayerNorm needs whole rows.
        """
        if stage.layer_norms or self.by_rows:
            return True
        if stage.batch_norms and statistics:
            return False
        panels, blocks = len(self.panels(stage)), ceil_div(self.batch, self.lanes)
        uneven = panels % self.partitions != 0 and panels < 4 * self.partitions
        return stage is self.last or (uneven and self._largest_part(blocks) < self._largest_part(panels))

    def _largest_part(self, units: int) -> float:
        """The part of the work that the busiest partition has, if `units` are divided."""
        return ceil_div(units, self.partitions) / units

    def in_tiles(self, stage: Stage) -> bool:
        """Whether a stage's products in training are computed in tiles from bf16 operands. The last layer stays in fp32."""
        if not self.settings.planes or stage.linear is None or stage is self.last:
            return False
        return (
            min(stage.linear.inputs, stage.width) >= MIN_TILE_WIDTH
            and self.batch >= MIN_TILE_BATCH[self.settings.planes]
        )

    @staticmethod
    def left_row(steps: int) -> int:
        """Bytes of a packed row of `steps` steps: an odd number of cache lines, so that a tile's rows fall into 16 sets."""
        return CACHE_LINE * (steps | 1)

    def needs_input_gradient(self, stage: Stage) -> bool:
        """Whether the gradient with respect to the input of this stage's Linear is used."""
        before = self.stages[stage.index - 1]
        return before.needs_gradient(len(before.groups) - 1)

    def skip_buffer(self, stage: Stage, number: int) -> str:
        """The buffer of the gradient that reaches a tapped group's output through additions, in panels.

        Where a single addition directly follows the product of its stage, that stage's own gradient stays as it is.
        """
        adding = self._additions(stage.index, number)
        if len(adding) == 1 and adding[0][1] == 1 and adding[0][0] > stage.index:
            first = self.stages[adding[0][0]].groups[0]
            if not first.operations and not first.tapped:
                return f"gradient.panels.{adding[0][0]}"
        return f"skip.{stage.index}.{number}"

    def sends_gradient(self, stage: Stage, number: int) -> bool:
        """Whether the backward pass copies the gradient of this group's addition to its source."""
        head = stage.groups[number].head
        if not isinstance(head, Add):
            return False
        source = self.stages[head.stage]
        return source.needs_gradient(head.group) and self.skip_buffer(source, head.group).startswith("skip")

    def adds_first(self, stage: Stage, number: int) -> bool:
        """Whether the addition at the head of this group is the first that the backward pass meets of those of its source."""
        head = stage.groups[number].head
        assert isinstance(head, Add)
        return self._additions(head.stage, head.group)[-1] == (stage.index, number)

    def _additions(self, stage: int, group: int) -> list[tuple[int, int]]:
        """(stage, group) of every addition of a group's output, in the order of the forward pass."""
        return [
            (other.index, number) for other in self.stages for number, one in enumerate(other.groups)
            if one.head == Add(stage, group)
        ]  # fmt: skip

    def gradient_sources(self, stage: Stage, partition: int) -> list[int]:
        """The partitions whose partial dX sum up to the gradient of this stage's output, as far as `partition` computes it."""
        after = self.stages[stage.index + 1]
        if self.by_rows:
            return [partition]
        if after is self.last:
            return [0]
        return [other for other in range(self.partitions) if self.owned_panels(after, other)]

    def offset(self, name: str) -> int:
        return self.buffers[name].offset

    def _place(self, name: str, size: int, at: int) -> int:
        """Add a buffer at the first cache line from `at` and return its end. A line between buffers prevents false sharing."""
        at = round_up(at, CACHE_LINE)
        self.buffers[name] = Buffer(name, at, size)
        return at + size + CACHE_LINE

    def _lay_out(self) -> None:
        end = self._place("control", 8 * len(CONTROL), 0)
        for kind in ("train", "validate"):
            end = self._place(f"call.{kind}", 8 * len(CALL), end)
        end = self._place("hyperparameters", 4 * len(HYPERPARAMETERS), end)
        end = self._place("zeros", 4 * self.panel_width, end)
        for partition in range(self.partitions):
            end = self._place(
                f"flag.{partition}", 8, end + CACHE_LINE
            )  # polled by others: keep prefetches of neighbouring lines away
            end = self._place(f"ticks.{partition}", 8 * MAX_PROFILED_PHASES if self.settings.profile else 0, end)
            end = self._place(f"tally.{partition}", 8 * len(TALLY), end)
            if self.settings.clips:
                end = self._place(f"squares.{partition}", 8, end + CACHE_LINE)
        end = self._place("scalars", 4 * len(SCALARS) * MAX_CALL_STEPS, end + CACHE_LINE)
        for partition in range(self.partitions):
            end = self._place(f"losses.{partition}", 8 * MAX_CALL_STEPS, end)
        end = self._lay_out_parameters(round_up(end, 4096))
        for stage in self.stages:
            for number in stage.batch_norms:
                names = (("running_mean", "mean"), ("running_var", "variance"))
                end = self._place_norm(stage, number, names, end, trained=False)
                end = self._place(f"batches.{stage.index}.{number}", 8, end)
                end = self._place(f"deviation.{stage.index}.{number}", 4 * self.padded(stage), end)
        # Training and validation never overlap in time, so they partition their scratch memory.
        scratch = round_up(end, 4096)
        used = max(self._lay_out_training(scratch), self._lay_out_validation(scratch))
        # The last tile of a product reads up to its height in rows of whatever follows its operand.
        slack = (
            4 * max(*self.target.heights(1), *self.target.heights(2)) * max(self.pitch(stage) for stage in self.stages)
        )
        self.size = round_up(used + slack, 4096)

    def _lay_out_parameters(self, start: int) -> int:
        end = start
        for stage in self.stages:
            if stage.linear:
                linear = stage.linear
                end = self._place(f"weight.{stage.index}", 4 * linear.inputs * self.padded(stage), end)
                name = tensor_name(linear.path, "weight")
                self.parameters.append(Parameter(name, f"weight.{stage.index}", linear.inputs, linear.outputs, True))
                end = self._place(f"bias.{stage.index}", 4 * self.padded(stage), end)
                if linear.bias:
                    name = tensor_name(linear.path, "bias")
                    self.parameters.append(Parameter(name, f"bias.{stage.index}", 0, linear.outputs, True))
            for number in (*stage.batch_norms, *stage.layer_norms):
                end = self._place_norm(stage, number, (("weight", "scale"), ("bias", "shift")), end, trained=True)
        self.state_stride = round_up(end - start, 4096)
        gradients = self.partitions if self.by_rows else int(self.settings.clips)
        copies = 1 + len(self.state_names) + gradients
        self.buffers["parameters"] = Buffer("parameters", start, self.state_stride * copies)
        return start + self.state_stride * copies

    def _place_norm(
        self, stage: Stage, number: int, names: tuple[tuple[str, str], ...], end: int, *, trained: bool
    ) -> int:
        """Vectors of a norm, as (name in the module, buffer). A module need not have them; the buffers always exist."""
        layer = stage.groups[number].head
        assert isinstance(layer, BatchNorm | LayerNorm)
        for kind, vector in names:
            buffer = f"{vector}.{stage.index}.{number}"
            end = self._place(buffer, 4 * self.padded(stage), end)
            if isinstance(layer, LayerNorm):
                exists = layer.scale if vector == "scale" else layer.shift
            else:
                exists = layer.affine if trained else layer.tracks
            if exists:
                self.parameters.append(Parameter(tensor_name(layer.path, kind), buffer, 0, stage.width, trained))
        return end

    def gradient_shift(self, partition: int) -> int:
        """Bytes from a parameter to its stored gradient; in a plan by rows, to that of a partition's rows."""
        return self.state_stride * (1 + len(self.state_names) + (partition if self.by_rows else 0))

    @property
    def state_names(self) -> tuple[str, ...]:
        return OPTIMIZERS[self.settings.optimizer].state_names(self.settings.momentum)

    def _lay_out_training(self, end: int) -> int:
        for stage in self.stages:
            activations = 4 * self.rows * self.pitch(stage)
            if stage.index == 0:
                for copy in range(self.partitions if self.private_input else 1):
                    for parity in range(2):
                        end = self._place(f"input.{parity}.{copy}", activations, end)
            if stage.index or not stage.is_plain:
                end = self._place(f"output.{stage.index}", activations, end)
            for number, group in enumerate(stage.groups):
                if group.batch_norm or group.layer_norm:
                    end = self._place(f"normalised.{stage.index}.{number}", activations, end)
                if group.layer_norm:
                    end = self._place(f"row_deviation.{stage.index}.{number}", 4 * self.rows, end)
                    for partition in range(self.partitions):
                        end = self._place(f"norm_sums.{stage.index}.{number}.{partition}", 8 * self.padded(stage), end)
                if group.tapped:
                    if number < len(stage.groups) - 1:
                        end = self._place(f"kept.{stage.index}.{number}", activations, end)
                    skip = self.skip_buffer(stage, number)
                    if skip.startswith("skip") and stage.needs_gradient(number):
                        end = self._place(skip, 4 * self.rows * self.padded(stage), end)
                if stage.stores_derivative(number):
                    end = self._place(f"derivative.{stage.index}.{number}", activations, end)
                for dropout in group.dropouts:
                    for partition in range(self.partitions):
                        size = 2 * self.drawn_bits(stage, partition)
                        end = self._place(f"bits.{dropout.layer}.{partition}", size, end)
            if stage.needs_gradient(len(stage.groups) - 1):
                gradient = 4 * self.rows * self.padded(stage)
                end = self._place(f"gradient.panels.{stage.index}", gradient, end)
                end = self._place(f"gradient.transposed.{stage.index}", gradient, end)
        end = self._lay_out_packed(end)
        widest = max(self.padded(stage) for stage in self.stages[:-1])
        for parity in range(2):  # alternating: while one set is read, the next layer's is written
            for partition in range(self.partitions):
                end = self._place(f"partial.{parity}.{partition}", 4 * self.rows * widest, end)
        if self.settings.weighted:
            end = self._place("row_weights", 4 * self.rows, end)
        return self._place("sums", 4 * self.rows, end)

    def _lay_out_packed(self, end: int) -> int:
        """Operands in bf16 of each partition: the largest left and right one of all products in tiles."""
        left = right = 0
        panel_step = TERMS * self.panel_width * 2
        batch_steps = ceil_div(self.batch, TERMS)
        for stage in filter(self.in_tiles, self.stages):
            assert stage.linear is not None
            inputs = ceil_div(stage.linear.inputs, TERMS)
            outputs = len(self.panels(stage))
            rows = [(batch_steps, inputs), (inputs, batch_steps)]  # (blocks of 32 rows, steps) forward and in dW
            left = max(left, TERMS * CACHE_LINE * outputs, *(TERMS * n * self.left_row(steps) for n, steps in rows))
            right = max(right, panel_step * inputs, panel_step * outputs * batch_steps)
        if left:
            for partition in range(self.partitions):
                end = self._place(f"packed.left.{partition}", self.settings.planes * left, end)
                end = self._place(f"packed.right.{partition}", self.settings.planes * right, end)
                end = self._place(f"block.{partition}", 4 * TERMS * TERMS, end)
        return end

    def _lay_out_validation(self, end: int) -> int:
        rows, widest = self.settings.validation_batch, max(self.pitch(stage) for stage in self.stages)
        for parity in range(2):
            end = self._place(f"validation.{parity}", 4 * rows * widest, end)
        for stage in self.stages:
            for number, group in enumerate(stage.groups):
                if group.tapped:
                    end = self._place(f"validation.kept.{stage.index}.{number}", 4 * rows * self.pitch(stage), end)
        return self._place("validation.sums", 4 * round_up(rows, self.lanes), end)

    def bits_region(self, stage: Stage, partition: int) -> tuple[int, int, int, int]:
        """(first row, rows, first column, columns) whose dropout bits a partition draws: the part whose forward it computes."""
        if stage.layer_norms or self.by_rows or (stage.index and self.forward_by_rows(stage)):
            first, last = self.owned_rows(partition, self.batch)
            return first, last - first, 0, self.padded(stage)
        owned = self.owned_panels(stage, partition)
        return 0, self.batch, owned[0].first if owned else 0, sum(panel.width for panel in owned)

    def drawn_bits(self, stage: Stage, partition: int) -> int:
        """The number of 16-bit values in `bits_region`, rounded up to whole vectors of Philox calls (8 values each)."""
        _, rows, _, columns = self.bits_region(stage, partition)
        return round_up(rows * round_up(columns, 8), 8 * self.lanes)

    def __str__(self) -> str:
        settings = self.settings
        lines = [
            f"native code for {self.target}",
            f"network {settings.network}, batch {settings.batch}, {settings.optimizer}, {settings.loss}; "
            f"work split into {self.partitions} partition{'s' * (self.partitions > 1)}"
            f"{', each with its rows of the batch in all layers' if self.by_rows else ''}",
            f"arena {self.size / 2**20:.2f} MiB: parameters and optimizer state "
            f"{self.buffers['parameters'].size / 2**20:.2f} MiB, the rest activations, gradients and control",
        ]
        for stage in self.stages:
            what = "input" if stage.linear is None else f"linear {stage.linear.inputs} -> {stage.width}"
            steps = []
            for group in stage.groups:
                head = group.head
                steps += ["batch norm"] if group.batch_norm else ["layer norm"] if group.layer_norm else []
                steps += [f"plus stage {head.stage}"] if isinstance(head, Add) else []
                steps += [op.name if isinstance(op, Activation) else f"dropout {op.p:g}" for op in group.operations]
            how = ""
            if stage.linear and not self.by_rows:
                how = "; forward by batch rows" if self.forward_by_rows(stage) else "; forward by columns"
                how += ", dW by input rows" if stage is self.last else ", dW by columns"
            lines.append(f"stage {stage.index}: {what}{''.join(', ' + step for step in steps)}{how}")
        when = "update after the norm of the gradient is known" if settings.clips else "update inside dW"
        when = "update with the sum of all partitions' gradients" if self.by_rows else when
        lines.append(f"{when}; the next batch is gathered while this one finishes")
        return "\n".join(lines)
