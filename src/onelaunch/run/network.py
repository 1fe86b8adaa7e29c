"""The description of a network, for the engines that compile it: a tuple of plain data. parse.py makes it from a module."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Flatten:
    """Joins all values of a row into one vector."""


@dataclass(frozen=True)
class Linear:
    path: str  # the module's name, from which `tensor_name` makes the names of its tensors
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class Activation:
    name: str  # a key of onelaunch.activations.ACTIVATIONS
    slope: float = 0.0  # of leaky_relu below zero


@dataclass(frozen=True)
class Dropout:
    p: float
    layer: int  # the `layer` of onelaunch.rng: the module's number among the dropout modules; higher for a second use


@dataclass(frozen=True)
class BatchNorm:
    path: str
    features: int
    eps: float
    momentum: float | None  # None: running statistics are averages over all steps
    affine: bool
    tracks: bool  # whether it keeps running statistics; without them, evaluation normalises by the batch


@dataclass(frozen=True)
class LayerNorm:
    path: str
    features: int
    eps: float
    scale: bool  # whether it has a weight
    shift: bool  # whether it has a bias


@dataclass(frozen=True)
class Add:
    """Adds the output of an earlier layer: a residual connection."""

    source: int  # the index of that layer in `Network.layers`; -1 is the network's input


Layer = Flatten | Linear | Activation | Dropout | BatchNorm | LayerNorm | Add
Norm = BatchNorm | LayerNorm


class NotAnMlpError(Exception):
    """The native engines cannot take the model as an MLP, for the reason in the message."""


def tensor_name(path: str, kind: str) -> str:
    """The name in the model's state_dict of a tensor ("weight", "bias", ...) of the module called `path` ("": the model)."""
    return f"{path}.{kind}" if path else kind


@dataclass(frozen=True)
class Network:
    """The layers in the order in which forward applies them, each to the output of the one before it."""

    layers: tuple[Layer, ...]
    functional_dropouts: int = 0  # the number of F.dropout calls per forward, which the eager engine masks too

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Linear))

    @property
    def inputs(self) -> int:
        return self.linears[0].inputs

    @property
    def outputs(self) -> int:
        return self.linears[-1].outputs

    @property
    def flattens(self) -> bool:
        return any(isinstance(layer, Flatten) for layer in self.layers)

    def __str__(self) -> str:
        """`784-128-10` for a chain of Linears of these widths."""
        return "-".join(str(width) for width in [self.inputs, *(linear.outputs for linear in self.linears)])


def without_dropout(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """The layers that evaluation computes."""
    kept: list[Layer] = []
    position = {-1: -1}
    for index, layer in enumerate(layers):
        if isinstance(layer, Add):
            kept.append(replace(layer, source=position[layer.source]))
        elif not isinstance(layer, Dropout):
            kept.append(layer)
        position[index] = len(kept) - 1
    return tuple(kept)
