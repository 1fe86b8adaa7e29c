"""How the work of a step is divided: panels of columns, rows of the batch, and which partition owns which.

The work of a step is split into `partitions`. Partition t owns whole panels of every stage: their forward, their part of dX,
their dW and the update. The last layer is owned by input rows instead, and its forward is split by batch rows, so that loss
and gradient need no exchange. Where `divides_rows` (rows.py) says so, partition t takes its rows of the batch through all
stages instead, and stores a gradient of all parameters of its own. It then updates its part of the parameters, or on a thread
of its own a copy of all. Results depend on the number of partitions, not on the number of threads.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from onelaunch.engines.cpu.plan.rows import divides_rows, has_private_weights, split, split_rows
from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.engines.cpu.plan.stages import Stage, stages_of
from onelaunch.engines.cpu.plan.target import CACHE_LINE, Target
from onelaunch.integers import ceil_div, round_up

# Products in tiles: layers at least so wide, and batches at least so large, by planes: with two and batch 32, packing takes
# longer than AVX-512 (784-128-128-128-10: 126 µs per step against 119). TERMS is the length of a step.
MIN_TILE_WIDTH, MIN_TILE_BATCH, TERMS = 64, {1: 16, 2: 64}, 32
# Up to this many partitions, each gathers the whole batch for itself. The rows then never travel between cores (the first
# forward of 784-128-128-128-10, batch 32, two threads: 28 -> 18 µs), and a step needs no barrier at its end.
MAX_PRIVATE_INPUTS = 4


class Panel(NamedTuple):
    """Columns side by side: two vectors, or one where the last panel is narrower."""

    first: int  # column
    width: int


@functools.cache
def _panels(columns: int, width: int) -> tuple[Panel, ...]:
    return tuple(Panel(first, min(width, columns - first)) for first in range(0, columns, width))


class Division:
    """The stages of a network, and each partition's part of them. Pure: no LLVM, no torch."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self.settings, self.target = settings, target
        self.stages = stages_of(settings.network)
        self.batch, self.partitions, self.lanes = settings.batch, settings.partitions, target.lanes
        self.panel_width = 2 * self.lanes
        self.rows = round_up(self.batch, self.lanes)
        self.by_rows = divides_rows(settings, self.panel_width)  # each partition has its rows in all stages
        self.private_weights = self.by_rows and has_private_weights(
            settings
        )  # each thread has a copy of the parameters

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

    def needs_input_gradient(self, stage: Stage) -> bool:
        """Whether the gradient with respect to the input of this stage's Linear is used."""
        before = self.stages[stage.index - 1]
        return before.needs_gradient(len(before.groups) - 1)

    def gradient_sources(self, stage: Stage, partition: int) -> list[int]:
        """The partitions whose partial dX sum up to the gradient of this stage's output, as far as `partition` computes it."""
        after = self.stages[stage.index + 1]
        if self.by_rows:
            return [partition]
        if after is self.last:
            return [0]
        return [other for other in range(self.partitions) if self.owned_panels(after, other)]

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
