"""A network as the graph engine runs it: stages of Linear → activation → dropout, of which the last is only a Linear.

A hidden stage may continue with a segment, which a kernel of its own computes row by row (kernels/row_segment.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onelaunch.activations import LEAKY_RELU_SLOPE, saves_input
from onelaunch.engines.stages import Stage as Cut
from onelaunch.engines.stages import Sum, UnsupportedNetworkError, cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, LayerNorm, Linear, Network

MAX_OUTPUTS = 1024  # a row of logits stays in a program's registers
MAX_SEGMENT_WIDTH = 4096  # and so does a row of a segment
# The places of layers after a Linear, in the order in which they are computed.
SLOTS = ("activation", "dropout", "before", "norm", "segment activation", "segment dropout", "after")
OUTPUT, MIDDLE = "output", "middle"


@dataclass(frozen=True)
class Source:
    """A value that a later stage adds: the output of hidden stage `stage`, or its value before the LayerNorm."""

    stage: int
    point: str  # OUTPUT or MIDDLE


@dataclass
class Segment:
    """dropout(act(norm(p + before))) + after, where p is the output of the stage's Linear with activation and dropout."""

    before: Source | None = None
    norm: LayerNorm | None = None
    activation: str | None = None
    p: float = 0.0
    layer: int = 0
    after: Source | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it only adds, in the backward pass, the gradient of a later addition."""
        return not (self.before or self.norm or self.activation or self.p or self.after)

    def __str__(self) -> str:
        parts = ["addition"] if self.before else []
        parts += ["layer norm"] if self.norm else []
        parts += [self.activation] if self.activation else []
        parts += [f"dropout({self.p:g})"] if self.p else []
        return " + ".join(parts + (["addition"] if self.after else []))


@dataclass
class Stage:
    linear: Linear
    activation: str | None = None
    p: float = 0.0
    layer: int = 0  # index of the dropout among the model's dropouts
    segment: Segment | None = None
    taps: set[str] = field(default_factory=set)  # OUTPUT and MIDDLE, where a later stage adds that value

    @property
    def saves_input(self) -> bool:
        """Whether the backward pass needs z, the value before the activation."""
        return saves_input(self.activation)

    def __str__(self) -> str:
        parts = [f"Linear({self.linear.inputs}, {self.linear.outputs})"]
        parts += [self.activation] if self.activation else []
        parts += [f"dropout({self.p:g})"] if self.p else []
        parts += [str(self.segment)] if self.segment and not self.segment.is_empty else []
        return " + ".join(parts)


def stages_of(network: Network) -> list[Stage]:
    """The network's stages; raises UnsupportedNetworkError where its layers do not follow the pattern."""
    before, *cut = cut_into_stages(network)
    if before.layers:
        raise UnsupportedNetworkError("a layer stands before the first Linear")
    if cut[-1].layers:
        raise UnsupportedNetworkError("a layer follows the last Linear")
    if network.outputs > MAX_OUTPUTS:
        raise UnsupportedNetworkError(f"the model has {network.outputs} outputs, more than {MAX_OUTPUTS}")
    slots = [_slots(part) for part in cut]
    stages: list[Stage] = []
    for part, places in zip(cut, slots, strict=True):
        assert part.linear is not None
        stages.append(Stage(part.linear))
        for layer, slot in zip(part.layers, places, strict=True):
            _add(stages, layer, SLOTS[slot], slots)
        if stages[-1].segment and part.linear.outputs > MAX_SEGMENT_WIDTH:
            raise UnsupportedNetworkError(f"a LayerNorm or an addition has more than {MAX_SEGMENT_WIDTH} units")
    return stages


def _slots(part: Cut) -> list[int]:
    """The slot of each layer: the first that it fits into after that of the layer before it."""
    kinds: dict[type, tuple[int, ...]] = {Activation: (0, 4), Dropout: (1, 5), Sum: (2, 6), LayerNorm: (3,)}
    found: list[int] = []
    for layer in part.layers:
        if isinstance(layer, BatchNorm):
            raise UnsupportedNetworkError(f"layer {layer.path!r} is a BatchNorm1d")
        behind = found[-1] if found else -1
        free = [slot for slot in kinds[type(layer)] if slot > behind]
        # Slots 4 and 5 belong to a segment, which begins with an addition or a LayerNorm.
        if not free or (free[0] in (4, 5) and behind < 2):
            raise UnsupportedNetworkError(_misplaced(layer))
        found.append(free[0])
    return found


def _misplaced(layer: Activation | Dropout | LayerNorm | Sum) -> str:
    match layer:
        case Dropout():
            return "two Dropouts follow one another"
        case Activation():
            return f"a {layer.name} follows another activation or a Dropout"
        case LayerNorm():
            return f"layer {layer.path!r} is a second LayerNorm after one Linear"
    return "two additions follow one Linear"


def _add(
    stages: list[Stage], layer: Activation | Dropout | BatchNorm | LayerNorm | Sum, slot: str, slots: list[list[int]]
) -> None:
    stage = stages[-1]
    if slot not in ("activation", "dropout"):
        stage.segment = stage.segment or Segment()
    target: Stage | Segment = stage.segment or stage
    match layer:
        case Dropout():
            target.p, target.layer = layer.p, layer.layer
        case Activation():
            if layer.name == "leaky_relu" and layer.slope != LEAKY_RELU_SLOPE:
                raise UnsupportedNetworkError(f"LeakyReLU has negative_slope={layer.slope}, not {LEAKY_RELU_SLOPE}")
            target.activation = layer.name
        case LayerNorm():
            assert stage.segment is not None
            if layer.eps <= 0:
                raise UnsupportedNetworkError(f"layer {layer.path!r} has eps={layer.eps}")
            stage.segment.norm = layer
        case Sum():
            assert stage.segment is not None
            setattr(stage.segment, slot, _source(stages, layer, slots))


def _source(stages: list[Stage], layer: Sum, slots: list[list[int]]) -> Source:
    """The value that an addition takes, marked as taken there."""
    if layer.stage == 0:
        raise UnsupportedNetworkError("the network's input is added to a later value")
    number, places = layer.stage - 1, slots[layer.stage - 1]
    if number == len(stages) - 1:
        raise UnsupportedNetworkError("a value is added within its own stage")
    if layer.layers == len(places):
        source = Source(number, OUTPUT)
    elif places[layer.layers] == 3 and (layer.layers == 0 or places[layer.layers - 1] <= 2):
        source = Source(number, MIDDLE)
    else:
        raise UnsupportedNetworkError("an addition takes a value from inside a stage")
    if source.point in stages[number].taps:
        raise UnsupportedNetworkError("a value is added twice")
    stages[number].taps.add(source.point)
    if stages[number].segment is None:  # its backward pass adds the gradient that comes through the addition
        stages[number].segment = Segment()
    return source


def product_name(stages: list[Stage], number: int) -> str:
    """The buffer that the kernel of a stage's Linear writes: p, from which a segment computes h, or h itself."""
    segment = stages[number].segment
    return f"p{number}" if segment and not segment.is_empty else f"h{number}"


def source_name(stages: list[Stage], source: Source) -> str:
    """The buffer of a value that a later stage adds."""
    if source.point == OUTPUT:
        return f"h{source.stage}"
    segment = stages[source.stage].segment
    return f"middle{source.stage}" if segment and segment.before else f"p{source.stage}"
