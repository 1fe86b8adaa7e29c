"""A plain network as the resident engine sees it: Linears, each followed by a chain of elementwise layers."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from onelaunch.engines.stages import Sum, UnsupportedNetworkError, cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, LayerNorm, Linear, Network

MISSING = {BatchNorm: "BatchNorm1d", LayerNorm: "LayerNorm", Sum: "a residual addition"}


@dataclass(frozen=True)
class Stage:
    linear: Linear
    chain: tuple[Activation | Dropout, ...]


def dropouts_of(stages: tuple[Stage, ...]) -> list[Dropout]:
    """The dropouts of all stages, in their order."""
    return [part for stage in stages for part in stage.chain if isinstance(part, Dropout)]


@functools.lru_cache(256)  # thousands of members have the same network
def stages_of(network: Network) -> tuple[Stage, ...]:
    """The network's stages; UnsupportedNetworkError where a layer is not in this engine."""
    before, *cut = cut_into_stages(network)
    if before.layers:
        raise UnsupportedNetworkError("a layer before the first Linear is not in this engine")
    stages = []
    missing: set[str] = set()
    for part in cut:
        assert part.linear is not None
        chain = tuple(layer for layer in part.layers if isinstance(layer, Activation | Dropout))
        missing |= {MISSING[type(layer)] for layer in part.layers if not isinstance(layer, Activation | Dropout)}
        stages.append(Stage(part.linear, chain))
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UnsupportedNetworkError(f"{' and '.join(sorted(missing))} {verb} not in this engine")
    return tuple(stages)
