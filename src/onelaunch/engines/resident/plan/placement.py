"""The choice of the plan: how many blocks, in a cluster or over the grid, how many rows per pass."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import (
    MAX_BATCH,
    MAX_OUTPUTS,
    MAX_ROWS,
    N_TILE,
    RESERVED_REGISTERS,
    ROW_TILE,
    WARPS,
    Settings,
)
from onelaunch.engines.resident.plan.units_plan import UnitsPlan
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.integers import ceil_div, round_up

MAX_ROWS_PER_BLOCK = 128  # per pass, where blocks divide the rows: one row tile per warp
CLUSTER_SIZES = (1, 2, 4, 8, 16)


def choose_plan(
    settings: Settings, chip: Chip, *, blocks: int | None = None, cluster: bool | None = None,
    by_rows: bool | None = None, reserved_registers: int = RESERVED_REGISTERS,
) -> Plan:  # fmt: skip
    """The plan predicted fastest among those that fit; UnsupportedNetworkError with the reason where none does.

    `blocks`, `cluster` and `by_rows` force a placement, for tests and measurements.
    """
    outputs = settings.stages[-1].linear.outputs
    if outputs > MAX_OUTPUTS:
        raise UnsupportedNetworkError(f"the model has {outputs} outputs, this engine takes up to {MAX_OUTPUTS}")
    if settings.batch > MAX_BATCH:
        raise UnsupportedNetworkError(f"batch_size={settings.batch} is above the {MAX_BATCH} rows this engine takes")
    kinds: list[Iterator[Iterator[Plan]]] = []
    if by_rows in (None, True):
        kinds.append(plans_by_rows(settings, chip))
    if by_rows in (None, False):
        kinds.append(plans_by_units(settings, chip, reserved_registers))
    fitting, reason = list[Plan](), "too wide for its blocks"
    for kind in kinds:
        refused = []
        for plans in kind:
            allowed = (p for p in plans if blocks in (None, p.blocks) and cluster in (None, p.cluster))
            for plan in allowed:
                if not plan.refusal:
                    fitting.append(plan)
                    break
                refused.append(plan)
        if refused:  # the reason of the more general kind, by units, comes last and stays
            reason = min(refused, key=lambda plan: plan.shared.size).refusal
    if not fitting:
        raise UnsupportedNetworkError(f"the network does not fit on the chip: {reason}")
    return min(fitting, key=lambda plan: plan.predicted_microseconds)


def plans_by_rows(settings: Settings, chip: Chip, warps: int = WARPS) -> Iterator[Iterator[Plan]]:
    """Per number of blocks, plans with ever fewer rows per pass: the first that fits is the best of them."""
    for blocks in _cluster_sizes(chip):
        batch = ceil_div(settings.batch, blocks)
        yield (RowsPlan(settings, chip, blocks, rows, warps) for rows in _rows_per_pass(batch, MAX_ROWS_PER_BLOCK))


def plans_by_units(settings: Settings, chip: Chip, reserved_registers: int) -> Iterator[Iterator[Plan]]:
    """The same for plans by units, per placement."""
    for blocks, cluster in _placements(settings, chip):
        yield (
            UnitsPlan(settings, chip, blocks, cluster, rows, reserved_registers=reserved_registers)
            for rows in _rows_per_pass(settings.batch, MAX_ROWS)
        )


def _placements(settings: Settings, chip: Chip) -> Iterator[tuple[int, bool]]:
    """Numbers of blocks, and whether they form a cluster."""
    hidden = [stage.linear.outputs for stage in settings.stages[:-1]]
    if not hidden:
        yield 1, False
        return
    n_tiles = ceil_div(max(hidden), N_TILE)
    for blocks in _cluster_sizes(chip):
        if blocks <= n_tiles:
            yield blocks, blocks > 1
    grids = {ceil_div(n_tiles, tiles_per_block): None for tiles_per_block in range(1, 5)}  # of the widest layer
    for blocks in grids:
        if 1 < blocks <= chip.multiprocessors:
            yield blocks, False


def _cluster_sizes(chip: Chip) -> list[int]:
    return [blocks for blocks in CLUSTER_SIZES if blocks == 1 or (chip.clusters and blocks <= chip.largest_cluster)]


def _rows_per_pass(batch: int, limit: int) -> Iterator[int]:
    """Rows per pass, most first: the whole batch if it fits, else a part of it."""
    rows = round_up(batch, ROW_TILE)
    if rows > ROW_TILE * 4:  # a multiple of what is multiplied at once
        whole = round_up(rows, ROW_TILE * 4)
        if rows < whole <= limit:
            yield whole
    if rows <= limit:
        yield rows
    for smaller in (256, 128, 64, 32, 16):
        if smaller < rows and smaller <= limit:
            yield smaller
