"""Whether the partitions of a step divide the rows of the batch through all layers, instead of the columns of each layer.

By columns, every layer's activations and partial sums of dX travel between the cores. By rows nothing does until the end of
the backward pass; then the gradients of the weights do, and the updated weights. The choice is a function of the settings
alone, so that a run has the same bits on every machine with its number of threads.
"""

from __future__ import annotations

from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.integers import ceil_div
from onelaunch.run.network import BatchNorm

MIN_ROWS = 32  # per partition: with fewer, tiles of dW are short and the weights are read for little work
MAX_WEIGHTS = 2**15  # up to here it was faster in every measurement; 64-256-256-10 with Adam was slower in two of three


def split(units: int, partitions: int, partition: int) -> tuple[int, int]:
    """The half-open range of `units` that belongs to one partition."""
    return units * partition // partitions, units * (partition + 1) // partitions


def split_rows(rows: int, block: int, partitions: int, partition: int) -> tuple[int, int]:
    """The half-open range of `rows` that belongs to one partition: whole blocks, except for the last one."""
    first, last = split(ceil_div(rows, block), partitions, partition)
    return min(first * block, rows), min(last * block, rows)


def divides_rows(settings: Settings, block: int) -> bool:
    """Whether every partition takes its rows of the batch, in blocks of `block` rows, through the whole step.

    It does where weights are few, and activations outnumber them: both are exchanged twice per step, as values and as
    gradients. A BatchNorm1d needs whole columns; clipping and products in tiles keep the columns too.
    """
    partitions, linears = settings.partitions, settings.network.linears
    if partitions == 1 or settings.clips or settings.planes:
        return False
    if any(isinstance(layer, BatchNorm) for layer in settings.network.layers):
        return False
    ranges = [split_rows(settings.batch, block, partitions, partition) for partition in range(partitions)]
    activations = settings.batch * sum(linear.outputs for linear in linears[:-1])
    weights = sum(linear.inputs * linear.outputs for linear in linears)
    return min(last - first for first, last in ranges) >= MIN_ROWS and weights < min(activations, MAX_WEIGHTS)
