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


# Partitions and weights up to which each partition on a thread of its own keeps a copy of all weights. Of p partitions, each
# then reads p - 1 gradients of all weights; otherwise those of its part, and the other parts of the weights. With 2 and 6,000
# weights it takes 0.8 to 0.95 of the time, with 16,000 as long, with 26,000 and Adam 1.03. More than 2 are not measured.
MAX_PRIVATE_PARTITIONS, MAX_PRIVATE_WEIGHTS = 2, 2**13


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
    return min(last - first for first, last in ranges) >= MIN_ROWS and _weights(settings) < min(
        activations, MAX_WEIGHTS
    )


def has_private_weights(settings: Settings) -> bool:
    """Whether every thread of a plan by rows reads and updates a copy of all weights, so that its products never wait for cache
    lines that another core has written."""
    return settings.partitions <= MAX_PRIVATE_PARTITIONS and _weights(settings) <= MAX_PRIVATE_WEIGHTS


def _weights(settings: Settings) -> int:
    return sum(linear.inputs * linear.outputs for linear in settings.network.linears)
