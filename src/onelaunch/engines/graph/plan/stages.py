"""A network as the graph engine runs it: stages of Linear → activation → dropout, of which the last is only a Linear."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.activations import LEAKY_RELU_SLOPE, saves_input
from onelaunch.engines.stages import Sum, UnsupportedNetworkError, cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, LayerNorm, Linear, Network

MAX_OUTPUTS = 1024  # a row of logits stays in a program's registers


@dataclass
class Stage:
    linear: Linear
    activation: str | None = None
    p: float = 0.0
    layer: int = 0  # index of the dropout among the model's dropouts

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass needs z, the value before the activation."""
        return saves_input(self.activation)

    def __str__(self) -> str:
        parts = [f"Linear({self.linear.inputs}, {self.linear.outputs})"]
        parts += [self.activation] if self.activation else []
        parts += [f"dropout({self.p:g})"] if self.p else []
        return " + ".join(parts)


def stages_of(network: Network) -> list[Stage]:
    """The network's stages; raises UnsupportedNetworkError where its layers do not follow the pattern."""
    before, *cut = cut_into_stages(network)
    if before.layers:
        raise UnsupportedNetworkError("a layer stands before the first Linear")
    stages = []
    for number, part in enumerate(cut, 1):
        assert part.linear is not None
        if number == len(cut) and part.layers:
            raise UnsupportedNetworkError("a layer follows the last Linear")
        stages.append(Stage(part.linear))
        for layer in part.layers:
            _add(stages[-1], layer)
    if network.outputs > MAX_OUTPUTS:
        raise UnsupportedNetworkError(f"the model has {network.outputs} outputs, more than {MAX_OUTPUTS}")
    return stages


def _add(stage: Stage, layer: Activation | Dropout | BatchNorm | LayerNorm | Sum) -> None:
    match layer:
        case BatchNorm() | LayerNorm():
            kind = "BatchNorm1d" if isinstance(layer, BatchNorm) else "LayerNorm"
            raise UnsupportedNetworkError(f"layer {layer.path!r} is a {kind}")
        case Sum():
            raise UnsupportedNetworkError("the model has a residual addition")
        case Dropout():
            if stage.p:
                raise UnsupportedNetworkError("two Dropouts follow one another")
            stage.p, stage.layer = layer.p, layer.layer
        case Activation():
            if stage.activation or stage.p:
                raise UnsupportedNetworkError(f"a {layer.name} follows another activation or a Dropout")
            if layer.name == "leaky_relu" and layer.slope != LEAKY_RELU_SLOPE:
                raise UnsupportedNetworkError(f"LeakyReLU has negative_slope={layer.slope}, not {LEAKY_RELU_SLOPE}")
            stage.activation = layer.name
