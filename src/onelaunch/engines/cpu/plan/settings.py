"""What the native code of a run is made for, and into how many shares its work is cut."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.run.network import Network

EVALUATION_ROWS = 256  # as the eager engine: BatchNorm1d without running statistics depends on it
FLOPS_PER_SHARE = 1.5e6  # a step's work below which a second thread costs more than it brings (barriers: 0.1-1 µs each)


@dataclass(frozen=True)
class Settings:
    """Everything the code is made for; what is not here is read from memory at run time."""

    network: Network
    batch: int
    evaluation: int  # rows of an evaluation batch
    shares: int
    optimizer: str
    momentum: bool
    nesterov: bool
    weight_decay: bool
    loss: str
    smoothing: bool
    bytes_in: bool  # x is uint8
    checks: bool = False  # there is validation data
    profile: bool = False  # count the clock ticks of every phase and barrier (see Program)


def useful_shares(network: Network, batch: int, threads: int) -> int:
    """How many shares pay: enough work for each, and a panel of the widest layer for each."""
    flops = sum(6 * batch * linear.inputs * linear.outputs for linear in network.linears)
    widest = max((linear.outputs for linear in network.linears[:-1]), default=network.inputs)
    return max(1, min(threads, int(flops / FLOPS_PER_SHARE), -(-widest // 32)))
