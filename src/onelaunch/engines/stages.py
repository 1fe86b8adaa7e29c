"""The division of a network into stages, shared by all native engines: a Linear and the layers up to the next Linear."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.run.network import Activation, Add, BatchNorm, Dropout, Flatten, LayerNorm, Linear, Network


class UnsupportedNetworkError(Exception):
    """A native engine cannot run this network; the message says why."""


@dataclass(frozen=True)
class Sum:
    """Adds an earlier value: that of stage `stage` after its first `layers` layers."""

    stage: int
    layers: int


@dataclass(frozen=True)
class Stage:
    """`linear` is None only for stage 0, which has the layers before the first Linear (often none)."""

    linear: Linear | None
    layers: tuple[Activation | Dropout | BatchNorm | LayerNorm | Sum, ...]


def cut_into_stages(network: Network) -> tuple[Stage, ...]:
    """Stage 0, then one stage per Linear. Flatten computes nothing and is left out."""
    stages = [Stage(None, ())]
    values = {-1: Sum(0, 0)}  # where the output of each layer of the network is found
    for index, layer in enumerate(network.layers):
        match layer:
            case Linear():
                stages.append(Stage(layer, ()))
            case Activation() | Dropout() | BatchNorm() | LayerNorm():
                stages[-1] = Stage(stages[-1].linear, (*stages[-1].layers, layer))
            case Add():
                stages[-1] = Stage(stages[-1].linear, (*stages[-1].layers, values[layer.source]))
            case Flatten():
                pass
        values[index] = Sum(len(stages) - 1, len(stages[-1].layers))
    return tuple(stages)


def unsupported_names(network: Network, activations: frozenset[str], optimizer: str, optimizers: frozenset[str]) -> str:
    """Why an engine with these activations and optimizers cannot run the network; empty when it can."""
    missing = {layer.name for layer in network.layers if isinstance(layer, Activation)} - activations
    if missing:
        return f"this engine does not have the activation {', '.join(sorted(missing))}"
    return "" if optimizer in optimizers else f"this engine does not have the optimizer {optimizer!r}"
