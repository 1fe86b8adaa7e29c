"""The plan of a run on the CPU: what lies where in the arena, and which share of the work does what. Pure: no LLVM, no torch.

Layouts (a *panel* is a group of columns two vectors wide; the last may be one vector wide):
  weights        one panel after another, `[inputs][panel width]` inside: one layout serves all three products
  activations    `[batch][pitch]`, the pitch an odd number of cache lines, so that a column does not fall into one cache set
  gradients dZ   twice: in panels `[panel][batch][width]` (for dW) and transposed `[batch panel][units][width]` (for dX)
Only the vector dimension is ever padded: products run over the exact number of inputs and rows, so whatever the padding
holds is never read into a result.

Shares. The work of a step is cut into `shares`; share t owns whole panels of every stage: their forward, their part of dX,
their dW and the update. The last layer is owned by input rows instead and its forward is cut by batch rows, so that loss
and gradient need no exchange. Results depend on the number of shares and not on how many threads execute them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.engines.cpu.plan.stages import Stage, stages_of
from onelaunch.engines.cpu.plan.target import Target
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.network import Activation

CACHE_LINE = 64
CHUNK_STEPS = 4096  # steps of one native call at most: the length of the loss and scalar buffers
MOST_PHASES = 128
# Up to this many shares each gathers the whole batch for itself: the rows then never travel between cores (the first forward
# of 784-128-128-128-10, batch 32, two threads: 28 -> 18 µs), and the barrier at the end of a step can go.
PRIVATE_INPUT_SHARES = 4
CONTROL = (
    "x", "y", "order", "rows", "first_row", "first_step", "count", "check_x", "check_y", "check_rows", "yield_thread",
    "seed", "patience", "abandoned",
)  # fmt: skip
# new_mean and new_square are 1 - beta1 and 1 - beta2, subtracted in double precision on the host.
HYPERPARAMETERS = ("momentum", "weight_decay", "beta2", "new_mean", "new_square", "eps", "smoothing")
SCALARS = ("rate", "inverse_root", "decay", "row_weight")  # per step; see optimizer.py and loss.py


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def split(units: int, shares: int, share: int) -> tuple[int, int]:
    """The half-open range of `units` that falls to one share."""
    return units * share // shares, units * (share + 1) // shares


class Panel(NamedTuple):
    first: int  # column
    width: int


class Buffer(NamedTuple):
    name: str
    offset: int  # bytes from the arena's start
    size: int  # bytes


class Parameter(NamedTuple):
    """Where a tensor of the model's state_dict lies."""

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
    state_stride: int = 0  # bytes from a parameter to its first optimizer state, and from that to the second
    size: int = 0

    def __post_init__(self) -> None:
        self.stages = stages_of(self.settings.network)
        self.batch, self.shares, self.lanes = self.settings.batch, self.settings.shares, self.target.lanes
        self.panel_width = 2 * self.lanes
        self.rows = round_up(self.batch, self.lanes)
        self._lay_out()

    # Geometry.

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def padded(self, stage: Stage) -> int:
        return round_up(stage.width, self.lanes)

    def pitch(self, stage: Stage) -> int:
        """Floats from one row of activations to the next: an odd number of cache lines."""
        line = max(CACHE_LINE // 4, self.lanes)
        return (round_up(stage.width, line) // line | 1) * line

    def _panels(self, columns: int) -> list[Panel]:
        return [Panel(first, min(self.panel_width, columns - first)) for first in range(0, columns, self.panel_width)]

    def panels(self, stage: Stage) -> list[Panel]:
        return self._panels(self.padded(stage))

    def batch_panels(self) -> list[Panel]:
        return self._panels(self.rows)

    def owned_panels(self, stage: Stage, share: int) -> list[Panel]:
        panels = self.panels(stage)
        first, last = split(len(panels), self.shares, share)
        return panels[first:last]

    def owned_columns(self, stage: Stage, share: int) -> tuple[int, int]:
        """Half-open range of a stage's units (without padding) that a share owns."""
        owned = self.owned_panels(stage, share)
        if not owned:
            return 0, 0
        return owned[0].first, min(owned[-1].first + owned[-1].width, stage.width)

    def owned_rows(self, share: int, rows: int) -> tuple[int, int]:
        """Rows of a batch of `rows` for work cut by rows: whole blocks of `lanes`, for the transposes."""
        first, last = split(-(-rows // self.lanes), self.shares, share)
        return min(first * self.lanes, rows), min(last * self.lanes, rows)

    @property
    def private_input(self) -> bool:
        return self.shares <= PRIVATE_INPUT_SHARES and self.stages[0].is_plain

    @property
    def steps_overlap(self) -> bool:
        """Whether a share may begin the next step while others finish this one.

        Its first phase then reads only what it wrote itself (input, own columns of the weights) and writes only its own
        columns of the first activations, which others read for the last time before the step's last barrier.
        """
        first = self.stages[1]
        return self.private_input and first is not self.last and not self.forward_by_rows(first)

    def forward_by_rows(self, stage: Stage, *, statistics: bool = True) -> bool:
        """Whether a stage's forward is cut by batch rows. Batch statistics need whole columns."""
        if stage.norms and statistics:
            return False
        panels = len(self.panels(stage))
        return stage is self.last or (panels % self.shares != 0 and panels < 4 * self.shares)

    def needs_input_gradient(self, stage: Stage) -> bool:
        """Whether the gradient with respect to the input of this stage's Linear is used."""
        before = self.stages[stage.index - 1]
        return stage.index > 1 or any(group.norm and group.norm.affine for group in before.groups)

    def gradient_sources(self, stage: Stage) -> list[int]:
        """The shares whose partial dX sum up to the gradient of this stage's output."""
        after = self.stages[stage.index + 1]
        if after is self.last:
            return [0]
        return [share for share in range(self.shares) if self.owned_panels(after, share)]

    # The arena.

    def offset(self, name: str) -> int:
        return self.buffers[name].offset

    def _place(self, name: str, size: int, at: int) -> int:
        """Put a buffer at `at` or just above and return where it ends; a line between two keeps writers apart."""
        at = round_up(at, CACHE_LINE)
        self.buffers[name] = Buffer(name, at, size)
        return at + size + CACHE_LINE

    def _lay_out(self) -> None:
        end = self._place("control", 8 * len(CONTROL), 0)
        end = self._place("hyperparameters", 4 * len(HYPERPARAMETERS), end)
        for share in range(self.shares):
            end = self._place(f"flag.{share}", 8, end + CACHE_LINE)  # polled by others: two lines of its own
            end = self._place(f"ticks.{share}", 8 * MOST_PHASES if self.settings.profile else 0, end)
            end = self._place(f"tally.{share}", 24, end)  # right predictions; evaluation: loss, right predictions
        end = self._place("scalars", 4 * len(SCALARS) * CHUNK_STEPS, end + CACHE_LINE)
        for share in range(self.shares):
            end = self._place(f"losses.{share}", 8 * CHUNK_STEPS, end)
        end = self._lay_out_parameters(round_up(end, 4096))
        for stage in self.stages:
            for number in stage.norms:
                names = (("running_mean", "mean"), ("running_var", "variance"))
                end = self._place_norm(stage, number, names, end, trained=False)
                end = self._place(f"batches.{stage.index}.{number}", 8, end)
                end = self._place(f"deviation.{stage.index}.{number}", 4 * self.padded(stage), end)
        # Training and evaluation never overlap in time, so their scratch lies in the same place.
        scratch = round_up(end, 4096)
        self.size = round_up(max(self._lay_out_training(scratch), self._lay_out_evaluation(scratch)), 4096)

    def _lay_out_parameters(self, start: int) -> int:
        end = start
        for stage in self.stages:
            if stage.linear:
                linear = stage.linear
                end = self._place(f"weight.{stage.index}", 4 * linear.inputs * self.padded(stage), end)
                name = f"{linear.path}.weight"
                self.parameters.append(Parameter(name, f"weight.{stage.index}", linear.inputs, linear.outputs, True))
                end = self._place(f"bias.{stage.index}", 4 * self.padded(stage), end)
                if linear.bias:
                    name = f"{linear.path}.bias"
                    self.parameters.append(Parameter(name, f"bias.{stage.index}", 0, linear.outputs, True))
            for number in stage.norms:
                end = self._place_norm(stage, number, (("weight", "scale"), ("bias", "shift")), end, trained=True)
        self.state_stride = round_up(end - start, 4096)
        copies = 1 + len(self.state_names)
        self.buffers["parameters"] = Buffer("parameters", start, self.state_stride * copies)
        return start + self.state_stride * copies

    def _place_norm(
        self, stage: Stage, number: int, names: tuple[tuple[str, str], ...], end: int, *, trained: bool
    ) -> int:
        """Vectors of a BatchNorm1d, by their names in the module and here; a module need not have them."""
        norm = stage.groups[number].norm
        assert norm is not None
        for kind, vector in names:
            buffer = f"{vector}.{stage.index}.{number}"
            end = self._place(buffer, 4 * self.padded(stage), end)
            if norm.affine if trained else norm.tracks:
                self.parameters.append(Parameter(f"{norm.path}.{kind}", buffer, 0, stage.width, trained))
        return end

    @property
    def state_names(self) -> tuple[str, ...]:
        return OPTIMIZERS[self.settings.optimizer].state_names(self.settings.momentum)

    def _lay_out_training(self, end: int) -> int:
        for stage in self.stages:
            activations = 4 * self.rows * self.pitch(stage)
            if stage.index == 0:
                for copy in range(self.shares if self.private_input else 1):
                    for parity in range(2):
                        end = self._place(f"input.{parity}.{copy}", activations, end)
            if stage.index or not stage.is_plain:
                end = self._place(f"output.{stage.index}", activations, end)
            for number, group in enumerate(stage.groups):
                if group.norm:
                    end = self._place(f"normal.{stage.index}.{number}", activations, end)
                if stage.stores_derivative(number):
                    end = self._place(f"derivative.{stage.index}.{number}", activations, end)
                for dropout in group.dropouts:
                    for share in range(self.shares):
                        size = 2 * self.drawn_bits(stage, share)
                        end = self._place(f"bits.{dropout.layer}.{share}", size, end)
            if stage.index or stage.norms:
                gradient = 4 * self.rows * self.padded(stage)
                end = self._place(f"gradient.panels.{stage.index}", gradient, end)
                end = self._place(f"gradient.transposed.{stage.index}", gradient, end)
        widest = max(self.padded(stage) for stage in self.stages[:-1])
        for parity in range(2):  # two sets take turns: while one is read, the next layer's is written
            for share in range(self.shares):
                end = self._place(f"partial.{parity}.{share}", 4 * self.rows * widest, end)
        return self._place("sums", 4 * self.rows, end)

    def _lay_out_evaluation(self, end: int) -> int:
        rows, widest = self.settings.evaluation, max(self.pitch(stage) for stage in self.stages)
        for parity in range(2):
            end = self._place(f"check.{parity}", 4 * rows * widest, end)
        return self._place("check.sums", 4 * round_up(rows, self.lanes), end)

    def bits_region(self, stage: Stage, share: int) -> tuple[int, int, int, int]:
        """(first row, rows, first column, columns) whose dropout bits a share draws: what it computes forward."""
        if stage.index and self.forward_by_rows(stage):
            first, last = self.owned_rows(share, self.batch)
            return first, last - first, 0, self.padded(stage)
        owned = self.owned_panels(stage, share)
        return 0, self.batch, owned[0].first if owned else 0, sum(panel.width for panel in owned)

    def drawn_bits(self, stage: Stage, share: int) -> int:
        """How many 16-bit numbers that is, in whole vectors of Philox calls (8 numbers each)."""
        _, rows, _, columns = self.bits_region(stage, share)
        return round_up(rows * round_up(columns, 8), 8 * self.lanes)

    # For people.

    def __str__(self) -> str:
        settings = self.settings
        lines = [
            f"native code for {self.target}",
            f"network {settings.network}, batch {settings.batch}, {settings.optimizer}, {settings.loss}; "
            f"work cut into {self.shares} share{'s' * (self.shares > 1)}",
            f"arena {self.size / 2**20:.2f} MiB: parameters and optimizer state "
            f"{self.buffers['parameters'].size / 2**20:.2f} MiB, the rest activations, gradients and control",
        ]
        for stage in self.stages:
            what = "input" if stage.linear is None else f"linear {stage.linear.inputs} -> {stage.width}"
            steps = []
            for group in stage.groups:
                steps += ["batch norm"] if group.norm else []
                steps += [op.name if isinstance(op, Activation) else f"dropout {op.p:g}" for op in group.operations]
            how = ""
            if stage.linear:
                how = "; forward by batch rows" if self.forward_by_rows(stage) else "; forward by columns"
                how += ", dW by input rows" if stage is self.last else ", dW by columns"
            lines.append(f"stage {stage.index}: {what}{''.join(', ' + step for step in steps)}{how}")
        lines.append("update inside dW; the next batch is gathered while this one finishes")
        return "\n".join(lines)
