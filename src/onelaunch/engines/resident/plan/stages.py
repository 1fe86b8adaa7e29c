"""A plain network as the resident engine sees it: Linears, each followed by a chain of elementwise layers."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.engines.stages import UnsupportedNetworkError, cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, Linear, Network


@dataclass(frozen=True)
class Stage:
    linear: Linear
    chain: tuple[Activation | Dropout, ...]


def stages_of(network: Network) -> tuple[Stage, ...]:
    """The network's stages; UnsupportedNetworkError where a layer is not in this engine."""
    before, *cut = cut_into_stages(network)
    if before.layers:
        raise UnsupportedNetworkError("a layer before the first Linear is not in this engine")
    stages = []
    for part in cut:
        assert part.linear is not None
        chain = tuple(layer for layer in part.layers if not isinstance(layer, BatchNorm))
        if len(chain) < len(part.layers):
            raise UnsupportedNetworkError("BatchNorm1d is not in this engine")
        stages.append(Stage(part.linear, chain))
    return tuple(stages)
