"""The layout of the arena: where every buffer of a run is, in bytes from the arena's start. Pure: no LLVM, no torch.

Layouts (a *panel* is a group of columns two vectors wide; the last may be one vector wide):
  weights        one panel after another, `[inputs][panel width]` inside: one layout serves all three products
  activations    `[batch][pitch]`, the pitch an odd number of cache lines, so that a column does not fall into one cache set
  gradients dZ   twice: in panels `[panel][batch][width]` (for dW) and transposed `[batch panel][units][width]` (for dX)
Only the vector dimension is ever padded. Products run over the exact number of inputs and rows, so the contents of the
padding never reach a result.
"""

from __future__ import annotations

from typing import NamedTuple

from onelaunch.engines.cpu.plan.division import TERMS, Division
from onelaunch.engines.cpu.plan.settings import CALL, CONTROL, HYPERPARAMETERS, SCALARS, TALLY
from onelaunch.engines.cpu.plan.skips import own_skip_buffer
from onelaunch.engines.cpu.plan.stages import Stage
from onelaunch.engines.cpu.plan.target import CACHE_LINE
from onelaunch.integers import ceil_div, round_up
from onelaunch.run.network import BatchNorm, LayerNorm, tensor_name

MAX_CALL_STEPS = 4096  # steps per native call: the length of the loss and scalar buffers
MAX_PROFILED_PHASES = 128
PAGE = 4096  # bytes


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


def packed_row_bytes(steps: int) -> int:
    """Bytes of a packed row of `steps` steps: an odd number of cache lines, so that a tile's rows fall into 16 sets."""
    return CACHE_LINE * (steps | 1)


class Layout:
    """`buffers` by name, the `parameters` among them, and the arena's `size` in bytes.

    `state_stride`: bytes from a parameter to its first optimizer state, and from one state to the next.
    """

    def __init__(self, division: Division) -> None:
        self.division, self.settings = division, division.settings
        self.buffers: dict[str, Buffer] = {}
        self.parameters: list[Parameter] = []
        self._end = 0  # of the buffers so far, and a cache line behind them
        self._place_control()
        self._start_page()
        self.state_stride = self._place_parameters()
        self._place_running_statistics()
        # Training and validation never overlap in time, so they share their scratch memory.
        scratch = self._start_page()
        self._place_training()
        used, self._end = self._end, scratch
        self._place_validation()
        # The last tile of a product reads up to its height in rows of whatever follows its operand.
        heights = max(*division.target.heights(1), *division.target.heights(2))
        slack = 4 * heights * max(division.pitch(stage) for stage in division.stages)
        self.size = round_up(max(used, self._end) + slack, PAGE)

    def _place(self, name: str, size: int, *, apart: bool = False) -> None:
        """Add a buffer at the next cache line. A line between buffers prevents false sharing; `apart` leaves one more, which
        keeps prefetches of neighbouring lines away from what other threads poll."""
        at = round_up(self._end + CACHE_LINE * apart, CACHE_LINE)
        self.buffers[name] = Buffer(name, at, size)
        self._end = at + size + CACHE_LINE

    def _start_page(self) -> int:
        """Continue at the next page; returns its offset."""
        self._end = round_up(self._end, PAGE)
        return self._end

    def _place_control(self) -> None:
        self._place("control", 8 * len(CONTROL))
        for kind in ("train", "validate"):
            self._place(f"call.{kind}", 8 * len(CALL))
        self._place("hyperparameters", 4 * len(HYPERPARAMETERS))
        self._place("zeros", 4 * self.division.panel_width)
        for partition in range(self.division.partitions):
            self._place(f"flag.{partition}", 8, apart=True)
            self._place(f"ticks.{partition}", 8 * MAX_PROFILED_PHASES if self.settings.profile else 0)
            self._place(f"tally.{partition}", 8 * len(TALLY))
            if self.settings.clips:
                self._place(f"squares.{partition}", 8, apart=True)
        self._place("scalars", 4 * len(SCALARS) * MAX_CALL_STEPS, apart=True)
        for partition in range(self.division.partitions):
            self._place(f"losses.{partition}", 8 * MAX_CALL_STEPS)

    def _place_parameters(self) -> int:
        """Parameters, then as much memory for each optimizer state and for stored gradients; returns the stride of these."""
        start, division = self._end, self.division
        for stage in division.stages:
            if stage.linear:
                weight, bias = f"weight.{stage.index}", f"bias.{stage.index}"
                inputs, outputs, path = stage.linear.inputs, stage.linear.outputs, stage.linear.path
                self._place(weight, 4 * inputs * division.padded(stage))
                self.parameters.append(Parameter(tensor_name(path, "weight"), weight, inputs, outputs, True))
                self._place(bias, 4 * division.padded(stage))
                if stage.linear.bias:
                    self.parameters.append(Parameter(tensor_name(path, "bias"), bias, 0, outputs, True))
            for number in (*stage.batch_norms, *stage.layer_norms):
                self._place_norm(stage, number, (("weight", "scale"), ("bias", "shift")), trained=True)
        stride = round_up(self._end - start, PAGE)
        copies = division.partitions if division.private_weights else 1
        gradients = division.partitions if division.by_rows else int(self.settings.clips)
        size = stride * (copies * (1 + len(self.settings.state_names)) + gradients)
        self.buffers["parameters"] = Buffer("parameters", start, size)
        self._end = start + size
        return stride

    def _place_norm(self, stage: Stage, number: int, names: tuple[tuple[str, str], ...], *, trained: bool) -> None:
        """Vectors of a norm, as (name in the module, buffer). A module need not have them; the buffers always exist."""
        layer = stage.groups[number].head
        assert isinstance(layer, BatchNorm | LayerNorm)
        for kind, vector in names:
            buffer = f"{vector}.{stage.index}.{number}"
            self._place(buffer, 4 * self.division.padded(stage))
            if isinstance(layer, LayerNorm):
                exists = layer.scale if vector == "scale" else layer.shift
            else:
                exists = layer.affine if trained else layer.tracks
            if exists:
                self.parameters.append(Parameter(tensor_name(layer.path, kind), buffer, 0, stage.width, trained))

    def _place_running_statistics(self) -> None:
        for stage in self.division.stages:
            for number in stage.batch_norms:
                names = (("running_mean", "mean"), ("running_var", "variance"))
                self._place_norm(stage, number, names, trained=False)
                self._place(f"batches.{stage.index}.{number}", 8)
                self._place(f"deviation.{stage.index}.{number}", 4 * self.division.padded(stage))

    def _place_training(self) -> None:
        division = self.division
        for stage in division.stages:
            activations = 4 * division.rows * division.pitch(stage)
            if stage.index == 0:
                for copy in range(division.partitions if division.private_input else 1):
                    for parity in range(2):
                        self._place(f"input.{parity}.{copy}", activations)
            if stage.index or not stage.is_plain:
                self._place(f"output.{stage.index}", activations)
            for number in range(len(stage.groups)):
                self._place_group(stage, number)
            if stage.needs_gradient(len(stage.groups) - 1):
                gradient = 4 * division.rows * division.padded(stage)
                self._place(f"gradient.panels.{stage.index}", gradient)
                self._place(f"gradient.transposed.{stage.index}", gradient)
        self._place_packed()
        widest = max(division.padded(stage) for stage in division.stages[:-1])
        for parity in range(2):  # alternating: while one set is read, the next layer's is written
            for partition in range(division.partitions):
                self._place(f"partial.{parity}.{partition}", 4 * division.rows * widest)
        if self.settings.weighted:
            self._place("row_weights", 4 * division.rows)
        self._place("sums", 4 * division.rows)

    def _place_group(self, stage: Stage, number: int) -> None:
        """What the forward pass of a group keeps for the backward pass, and its random bits."""
        division, group, here = self.division, stage.groups[number], f"{stage.index}.{number}"
        activations = 4 * division.rows * division.pitch(stage)
        if group.batch_norm or group.layer_norm:
            self._place(f"normalised.{here}", activations)
        if group.layer_norm:
            self._place(f"row_deviation.{here}", 4 * division.rows)
            for partition in range(division.partitions):
                self._place(f"norm_sums.{here}.{partition}", 8 * division.padded(stage))
        if group.tapped:
            if number < len(stage.groups) - 1:
                self._place(f"kept.{here}", activations)
            if skip := own_skip_buffer(division.stages, stage, number):
                self._place(skip, 4 * division.rows * division.padded(stage))
        if stage.stores_derivative(number):
            self._place(f"derivative.{here}", activations)
        for dropout in group.dropouts:
            for partition in range(division.partitions):
                self._place(f"bits.{dropout.layer}.{partition}", 2 * division.drawn_bits(stage, partition))

    def _place_packed(self) -> None:
        """Operands in bf16 of each partition: the largest left and right one of all products in tiles."""
        left = right = 0
        panel_step = TERMS * self.division.panel_width * 2
        batch_steps = ceil_div(self.division.batch, TERMS)
        for stage in filter(self.division.in_tiles, self.division.stages):
            assert stage.linear is not None
            inputs = ceil_div(stage.linear.inputs, TERMS)
            outputs = len(self.division.panels(stage))
            rows = [(batch_steps, inputs), (inputs, batch_steps)]  # (blocks of 32 rows, steps) forward and in dW
            left = max(left, TERMS * CACHE_LINE * outputs, *(TERMS * n * packed_row_bytes(steps) for n, steps in rows))
            right = max(right, panel_step * inputs, panel_step * outputs * batch_steps)
        if left:
            for partition in range(self.division.partitions):
                self._place(f"packed.left.{partition}", self.settings.planes * left)
                self._place(f"packed.right.{partition}", self.settings.planes * right)
                self._place(f"block.{partition}", 4 * TERMS * TERMS)

    def _place_validation(self) -> None:
        rows, division = self.settings.validation_batch, self.division
        widest = max(division.pitch(stage) for stage in division.stages)
        for parity in range(2):
            self._place(f"validation.{parity}", 4 * rows * widest)
        for stage in division.stages:
            for number, group in enumerate(stage.groups):
                if group.tapped:
                    self._place(f"validation.kept.{stage.index}.{number}", 4 * rows * division.pitch(stage))
        self._place("validation.sums", 4 * round_up(rows, division.lanes))
