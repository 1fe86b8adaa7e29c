"""A plain network as the resident engine sees it: Linears, each followed by a chain of elementwise layers."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.train.network import Activation, BatchNorm, Dropout, Flatten, Linear, Network


@dataclass(frozen=True)
class Stage:
    linear: Linear
    chain: tuple[Activation | Dropout, ...]


class NotResidentError(Exception):
    """The network does not fit this engine; the message says why."""


def stages_of(network: Network) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    for layer in network.layers:
        match layer:
            case Flatten():
                pass
            case Linear():
                stages.append(Stage(layer, ()))
            case BatchNorm():
                raise NotResidentError("BatchNorm1d is not in this engine")
            case Activation() | Dropout():
                if not stages:
                    raise NotResidentError("a layer before the first Linear is not in this engine")
                stages[-1] = Stage(stages[-1].linear, (*stages[-1].chain, layer))
    return tuple(stages)
