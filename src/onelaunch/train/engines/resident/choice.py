"""Which plan: how many blocks, in a cluster or over the grid, how many rows a pass."""

from __future__ import annotations

from collections.abc import Iterator

from onelaunch.train.engines.resident.plan import (
    MOST_BATCH,
    MOST_OUTPUTS,
    MOST_ROWS,
    ROW_TILE,
    TILE,
    WORKING_REGISTERS,
    Chip,
    Plan,
    Settings,
)  # fmt: skip
from onelaunch.train.engines.resident.stages import NotResidentError


def choose_plan(
    settings: Settings, chip: Chip, *, blocks: int | None = None, cluster: bool | None = None,
    working: int = WORKING_REGISTERS,
) -> Plan:  # fmt: skip
    """The plan predicted fastest among those that fit; NotResidentError with the reason where none does.

    `blocks` and `cluster` force a placement, for tests and measurements.
    """
    outputs = settings.stages[-1].linear.outputs
    if outputs > MOST_OUTPUTS:
        raise NotResidentError(f"the model has {outputs} outputs, this engine takes up to {MOST_OUTPUTS}")
    if settings.batch > MOST_BATCH:
        raise NotResidentError(f"batch_size={settings.batch} is above the {MOST_BATCH} rows this engine takes")
    refusals: list[str] = []
    best: tuple[float, Plan] | None = None
    for count, clustered in _placements(settings, chip):
        if blocks not in (None, count) or cluster not in (None, clustered):
            continue
        for rows in _pass_rows(settings.batch):
            plan = Plan(settings, chip, count, clustered, rows, working=working)
            if plan.refusal:
                refusals.append(plan.refusal)
                continue
            seconds = predicted_microseconds(plan)
            if best is None or seconds < best[0]:
                best = seconds, plan
            break
    if best is None:
        raise NotResidentError(
            f"the network does not fit on the chip: {refusals[-1] if refusals else 'too wide for its blocks'}"
        )
    return best[1]


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


def _pass_rows(batch: int) -> Iterator[int]:
    """Rows of a pass, the most first: the whole batch if it fits, else a part of it."""
    rows = -(-batch // ROW_TILE) * ROW_TILE
    if rows > ROW_TILE * 4:
        rows = -(-rows // (ROW_TILE * 4)) * ROW_TILE * 4  # a multiple of what is multiplied at once
    if rows <= MOST_ROWS:
        yield rows
    for smaller in (256, 128, 64, 32, 16):
        if smaller < rows:
            yield smaller


def predicted_microseconds(plan: Plan) -> float:
    """A step's time, roughly: only the order of the candidates matters. Fitted to nine plans timed on an H200."""
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
    return time * plan.micro_batches
