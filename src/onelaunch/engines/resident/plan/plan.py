"""The interface of a plan, and the arithmetic of rows and bookkeeping that both kinds of plans share.

`UnitsPlan` divides the units of every layer among the blocks, `RowsPlan` divides the rows of a batch. A plan is pure
arithmetic: no device is needed. Its source is CUDA C++ with the plan's numbers as constants, and the tests execute it in NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.layers import Layer, Memory
from onelaunch.engines.resident.plan.settings import (
    ALL_REGISTERS,
    FLAG_STRIDE,
    INTERVAL,
    K_TILE,
    MEMBER_BYTES,
    PLANES,
    REGISTERS,
    ROW_TILE,
    WARPS,
    Settings,
)
from onelaunch.integers import ceil_div, clamp
from onelaunch.optimizers import OPTIMIZERS

Phases = list[tuple[str, str]]  # names and statements


class Plan(ABC):
    layers: tuple[Layer, ...]
    shared: Memory  # of each block
    exchange: Memory  # global memory through which the blocks of a grid exchange values
    input_buffers: int  # 2: the next rows are fetched while this pass computes
    row_numbers_at_once: int

    def __init__(
        self, settings: Settings, chip: Chip, blocks: int, cluster: bool, rows: int, row_partitions: int = 1,
        warps: int = WARPS,
    ) -> None:  # fmt: skip
        """`rows`: of one block in one pass; `row_partitions`: blocks that divide the rows of a batch; `warps`: of a block."""
        self.settings, self.chip = settings, chip
        self.warps, self.threads = warps, 32 * warps
        self.blocks, self.cluster = blocks, cluster
        self.planes = PLANES[settings.precision]
        self.states = len(OPTIMIZERS[settings.optimizer].state_names(settings.momentum))
        self.rows, self.row_tiles = rows, rows // ROW_TILE
        self.micro_batches = ceil_div(settings.batch, rows * row_partitions)
        self.input_planes = 1 if settings.uint8_rows else self.planes
        self.input_bytes = 1 if settings.uint8_rows else 2  # per number
        self.registers_per_thread = min(
            REGISTERS, ALL_REGISTERS // (self.threads * settings.per_multiprocessor) // 8 * 8
        )

    # What differs between the two kinds.

    @property
    @abstractmethod
    def decision(self) -> int:
        """The number of the last exchange, in which block 0 tells all whether the run goes on."""

    @property
    @abstractmethod
    def multicasts_rows(self) -> bool:
        """Whether each block of a cluster fetches a part of the next rows for all blocks."""

    @property
    @abstractmethod
    def predicted_microseconds(self) -> float:
        """Roughly the time of a step. Only the order of the candidates matters. Fitted to plans timed on an H200."""

    @abstractmethod
    def exchange_names(self) -> dict[int, str]:
        """What the blocks exchange, by the number of the exchange."""

    @abstractmethod
    def exchanged_bytes(self) -> dict[int, int]:
        """Bytes that block 0 receives in each exchange, by its number. No other block receives more."""

    @abstractmethod
    def phases(self) -> Phases:
        """The phases of a training pass in their order, as names and CUDA statements."""

    @abstractmethod
    def source(self, *, faults: bool = False, stamps: bool = False) -> str:
        """The translation unit. `faults` adds the injected fault, `stamps` the clocks that measure each phase."""

    @abstractmethod
    def describe(self) -> str:
        """The plan in words, as `History.plan` shows it."""

    def phase_names(self) -> list[str]:
        """The names of the phases, in the order in which the stamps count them, after the time between passes."""
        return [name for name, _ in self.phases()]

    # Exchanges.

    @property
    def exchanges(self) -> int:
        return self.decision + 1

    @property
    def flag_words(self) -> int:
        return self.exchanges * self.blocks * FLAG_STRIDE

    # Rows.

    @property
    def input_pitch(self) -> int:
        """Bytes of a row in global memory: whole k tiles."""
        return self.layers[0].k_tiles * K_TILE * self.input_bytes

    @property
    def shared_pitch(self) -> int:
        """Bytes of a row in shared memory: an odd number of 16-byte pieces, so that eight rows use different banks."""
        return self.input_pitch // 16 // 2 * 32 + 16 if self.input_pitch // 16 % 2 else self.input_pitch + 16

    @property
    def input_buffer_bytes(self) -> int:
        return self.input_planes * self.rows * self.shared_pitch

    @property
    def loss_units(self) -> int:
        """Terms of a row's loss, over which it is a mean: one, or one per output."""
        return 1 if self.settings.loss == "cross_entropy" else self.settings.stages[-1].linear.outputs

    @property
    def target_words(self) -> int:
        """4-byte words per target: a class, or one float per output; then the row's weight, if rows have weights."""
        return self.loss_units + self.settings.weighted

    @property
    def table_rows(self) -> int:
        """Row numbers of a step that a block needs, including those that fill up its last pass."""
        return self.micro_batches * self.rows

    @property
    def steps_per_row_table(self) -> int:
        """Steps whose row numbers are computed at once."""
        return clamp(1, self.row_numbers_at_once // self.table_rows, INTERVAL)

    @property
    def tables_per_host_poll(self) -> int:
        """Tables of learning rates between two polls of the host. A poll takes microseconds, as long as a step of few rows."""
        return 4 if self.settings.batch <= 64 else 1

    # Shared memory.

    def _add_inputs(self) -> Memory:
        """New memory with the rows and targets of a pass."""
        shared = Memory()
        shared.add("inputs", self.input_buffer_bytes * self.input_buffers)
        shared.add("targets", 4 * self.rows * self.target_words * self.input_buffers)
        return shared

    def _add_bookkeeping(self, shared: Memory, score_bytes: int = 0) -> None:
        """Everything that is not the network. `score_bytes`: of the scores that blocks send into the region of the losses."""
        shared.add("losses", max(4 * self.warps, score_bytes))
        shared.add("validation loss", 8)
        shared.add("correct", 4)
        shared.add("broken", 4)  # a loss was not finite
        shared.add("decision", 8)
        shared.add("fault", 8)
        shared.add("rates", 16 * INTERVAL)
        shared.add("round keys", 32 * self.steps_per_row_table)
        shared.add("row numbers", 8 * self.steps_per_row_table * self.table_rows)
        shared.add("barriers", 16 * self.exchanges)
        shared.add("row barriers", 8 * self.input_buffers)
        if self.settings.members:  # the last region: it outlives a member
            shared.add("member", MEMBER_BYTES)

    @property
    def fits(self) -> bool:
        """Whether a block's shared memory holds the plan."""
        return self.shared.size <= self.chip.shared_bytes

    @property
    def refusal(self) -> str:
        """Why this plan cannot run on its chip; empty when it can."""
        if not self.fits:
            return (
                f"{self.blocks} blocks need {ceil_div(self.shared.size, 1024)} KiB of shared memory each, "
                f"{self.chip.shared_bytes // 1024} are there"
            )
        if self.blocks > self.chip.multiprocessors:
            return f"{self.blocks} blocks do not fit on {self.chip.multiprocessors} multiprocessors at once"
        return ""
