"""Which plan: how many blocks, in a cluster or over the grid, how many rows a pass."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.device import Chip
from onelaunch.engines.resident.plan.rows_plan import RowsPlan
from onelaunch.engines.resident.plan.settings import (
    MOST_BATCH,
    MOST_OUTPUTS,
    MOST_ROWS,
    ROW_TILE,
    TILE,
    TILE_BYTES,
    WARPS,
    WORKING_REGISTERS,
    Settings,
)
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.engines.stages import UnsupportedNetworkError

MOST_SHARE = 128  # rows of a block in a pass, where blocks divide the rows: a tile a warp
CLOCKS_A_MICROSECOND = 1755


def choose_plan(
    settings: Settings, chip: Chip, *, blocks: int | None = None, cluster: bool | None = None,
    by_rows: bool | None = None,
    working: int = WORKING_REGISTERS,
) -> Plan:  # fmt: skip
    """The plan predicted fastest among those that fit; UnsupportedNetworkError with the reason where none does.

    `blocks`, `cluster` and `by_rows` force a placement, for tests and measurements.
    """
    outputs = settings.stages[-1].linear.outputs
    if outputs > MOST_OUTPUTS:
        raise UnsupportedNetworkError(f"the model has {outputs} outputs, this engine takes up to {MOST_OUTPUTS}")
    if settings.batch > MOST_BATCH:
        raise UnsupportedNetworkError(f"batch_size={settings.batch} is above the {MOST_BATCH} rows this engine takes")
    refused: list[Plan] = []
    fitting: list[Plan] = []
    for candidates in _candidates(settings, chip, working):
        for plan in candidates:
            if blocks not in (None, plan.blocks) or cluster not in (None, plan.cluster):
                continue
            if by_rows not in (None, isinstance(plan, RowsPlan)):
                continue
            if not plan.refusal:
                fitting.append(plan)
                break
            refused.append(plan)
    if not fitting:
        by_units = [plan for plan in refused if not isinstance(plan, RowsPlan)]  # the more general
        nearest = min(by_units or refused, key=lambda plan: plan.shared.size, default=None)
        reason = nearest.refusal if nearest else "too wide for its blocks"
        raise UnsupportedNetworkError(f"the network does not fit on the chip: {reason}")
    return min(fitting, key=predicted_microseconds)


def _candidates(settings: Settings, chip: Chip, working: int) -> Iterator[Iterator[Plan]]:
    """Each iterator gives plans of one placement with ever fewer rows a pass: the first that fits is the best of them."""
    for count in (1, 2, 4, 8, 16):
        if count == 1 or (chip.clusters and count <= chip.largest_cluster):
            share = -(-settings.batch // count)
            yield (RowsPlan(settings, chip, count, rows) for rows in _pass_rows(share, MOST_SHARE))
    for count, clustered in _placements(settings, chip):
        yield (
            Plan(settings, chip, count, clustered, rows, working=working)
            for rows in _pass_rows(settings.batch, MOST_ROWS)
        )


def _placements(settings: Settings, chip: Chip) -> Iterator[tuple[int, bool]]:
    hidden = [stage.linear.outputs for stage in settings.stages[:-1]]
    if not hidden:
        yield 1, False
        return
    tiles = -(-max(hidden) // TILE)
    for blocks in (1, 2, 4, 8, 16):
        if blocks <= max(tiles, 1) and (blocks == 1 or (chip.clusters and blocks <= chip.largest_cluster)):
            yield blocks, blocks > 1
    tried = set()
    for a_block in range(1, 5):  # tiles of the widest layer
        blocks = -(-tiles // a_block)
        if 1 < blocks <= chip.multiprocessors and blocks not in tried:
            tried.add(blocks)
            yield blocks, False


def _pass_rows(batch: int, most: int) -> Iterator[int]:
    """Rows of a pass, the most first: the whole batch if it fits, else a part of it."""
    rows = -(-batch // ROW_TILE) * ROW_TILE
    if rows > ROW_TILE * 4:  # a multiple of what is multiplied at once
        whole = -(-rows // (ROW_TILE * 4)) * ROW_TILE * 4
        if rows < whole <= most:
            yield whole
    if rows <= most:
        yield rows
    for smaller in (256, 128, 64, 32, 16):
        if smaller < rows and smaller <= most:
            yield smaller


def predicted_microseconds(plan: Plan) -> float:
    """A step's time, roughly: only the order of the candidates matters. Fitted to plans timed on an H200."""
    if isinstance(plan, RowsPlan):
        return _predicted_by_rows(plan)
    exchange, kilobyte = (0.0, 0.0) if plan.blocks == 1 else (0.2, 0.02) if plan.cluster else (1.0, 0.012)
    groups = plan.row_tiles // plan.group
    time = 0.8
    for layer in plan.layers:
        phases = 2 if layer.first else 3
        pairs = plan.planes * (plan.planes + 1) / 2
        products = plan.row_tiles * layer.tiles * layer.steps_a_warp * pairs
        time += phases * (0.25 * groups + (0.0 if layer.last else 0.008 * products))
        if not layer.last:
            time += (1 if layer.first else 2) * (exchange + kilobyte * plan.exchanged_bytes(layer) / 1024)
    time *= 1.2
    if plan.input_buffers == 1:  # rows are waited for
        time += 0.012 * plan.input_buffer_bytes / 1024
    return time * plan.micro_batches


def _predicted_by_rows(plan: RowsPlan) -> float:
    pairs = plan.planes * (plan.planes + 1) / 2
    clocks = 500.0 + plan.slots * plan.row_tiles * pairs * 30  # the loss; the weights' gradient
    for layer in plan.layers:
        tiles = layer.tiles if layer.last else plan.tiles_each(layer)
        clocks += (1 if layer.first else 2) * (250 + 20 * layer.steps * tiles * pairs)
    clocks *= plan.micro_batches
    if plan.blocks > 1:
        sent = plan.slots * WARPS * TILE_BYTES + plan.copies_total
        clocks += 1000 + 100 * plan.blocks + sent / 40  # bytes a clock
    clocks += 150 * plan.own_slots  # the update
    return (clocks + 3300) / CLOCKS_A_MICROSECOND
