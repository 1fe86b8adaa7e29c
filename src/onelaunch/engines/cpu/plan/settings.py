"""What the program of a run depends on, and into how many partitions its work is split."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.integers import ceil_div
from onelaunch.optimizers import CONSTANTS, OPTIMIZERS
from onelaunch.run.network import Network

CONTROL = ("spins_before_yield", "yield_thread", "abandoned")  # what a barrier reads, eight bytes each
CALL = ("count", "first_row", "first_step")  # of a native call: steps, first row in the epoch, number of the first step
HYPERPARAMETERS = (*CONSTANTS, "label_smoothing", "clip_norm")  # per run
SCALARS = ("rate", "inverse_root", "decay", "row_weight")  # per step; see onelaunch.optimizers and loss.py
TALLY = ("correct", "validation_loss", "validation_correct")  # per partition: int64, double, int64
MIN_VALIDATION_BATCH = 256  # as in the eager engine: BatchNorm1d without running statistics depends on it
FLOPS_PER_PARTITION = 1.5e6  # per step; with less, a second thread costs more than it saves (barriers: 0.1-1 µs each)
# More partitions take longer, on 16 cores of an Emerald Rapids: 784-784-784-784-10 (batch 64) 1.10 ms per step with 8 and 1.72
# with 16, 784-512-512-10 (batch 128) 0.82 and 0.98. The partial sums of dX grow with their number.
MAX_PARTITIONS = 8


@dataclass(frozen=True)
class Settings:
    """Everything the program depends on; all other options are read from memory at run time."""

    network: Network
    batch: int
    validation_batch: int  # rows
    partitions: int
    optimizer: str
    momentum: bool
    nesterov: bool
    weight_decay: bool
    loss: str
    label_smoothing: bool
    uint8_rows: bool
    weighted: bool = False  # rows have weights in the loss
    clips: bool = False  # by the global norm of the gradient
    validates: bool = False  # there is validation data
    planes: int = 0  # of operands in bf16: 1 ("bf16") or 2 ("tf32"); 0 for products in fp32
    profile: bool = False  # count the clock ticks of every phase and barrier (see program.py)

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer's states of a parameter, in the order of the arena."""
        return OPTIMIZERS[self.optimizer].state_names(self.momentum)


def useful_partitions(network: Network, batch: int, threads: int) -> int:
    """How many partitions are worth their barriers: not too many, and each has enough work and a panel of the widest layer."""
    flops = sum(6 * batch * linear.inputs * linear.outputs for linear in network.linears)
    widest = max((linear.outputs for linear in network.linears[:-1]), default=network.inputs)
    return max(1, min(threads, MAX_PARTITIONS, int(flops / FLOPS_PER_PARTITION), ceil_div(widest, 32)))
