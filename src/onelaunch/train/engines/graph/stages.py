"""A plain network as the graph engine sees it: stages of Linear → activation → dropout, the last a Linear alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from onelaunch.kernels.run_arguments import FROM_OUTPUT
from onelaunch.train.network import Activation, BatchNorm, Dropout, Flatten, Linear, Network

LEAKY_SLOPE = 0.01  # PyTorch's default, which the kernels know
MOST_OUTPUTS = 1024  # a row of logits stays in a program's registers


class NotStagedError(Exception):
    """The layers do not follow this pattern; the message says where."""


@dataclass
class Stage:
    linear: Linear
    activation: str | None = None
    p: float = 0.0
    layer: int = field(default=0)  # of the dropout, among the model's

    @property
    def from_z(self) -> bool:
        return self.activation is not None and self.activation not in FROM_OUTPUT

    def __str__(self) -> str:
        parts = [f"Linear({self.linear.inputs}, {self.linear.outputs})"]
        parts += [self.activation] if self.activation else []
        parts += [f"dropout({self.p:g})"] if self.p else []
        return " + ".join(parts)


def stages_of(network: Network) -> list[Stage]:
    stages: list[Stage] = []
    for layer in network.layers:
        match layer:
            case Flatten():
                pass
            case Linear():
                stages.append(Stage(layer))
            case BatchNorm():
                raise NotStagedError(f"layer {layer.path!r} is a BatchNorm1d")
            case Activation() | Dropout() if not stages:
                raise NotStagedError("a layer stands before the first Linear")
            case Activation():
                _add_activation(stages[-1], layer)
            case Dropout():
                if stages[-1].p:
                    raise NotStagedError("two Dropouts follow one another")
                stages[-1].p, stages[-1].layer = layer.p, layer.layer
    if stages[-1].activation or stages[-1].p:
        raise NotStagedError("a layer follows the last Linear")
    if network.outputs > MOST_OUTPUTS:
        raise NotStagedError(f"the model has {network.outputs} outputs, more than {MOST_OUTPUTS}")
    return stages


def _add_activation(stage: Stage, layer: Activation) -> None:
    if stage.activation or stage.p:
        raise NotStagedError(f"a {layer.name} follows another activation or a Dropout")
    if layer.name == "leaky_relu" and layer.slope != LEAKY_SLOPE:
        raise NotStagedError(f"LeakyReLU has negative_slope={layer.slope}, not {LEAKY_SLOPE}")
    stage.activation = layer.name
