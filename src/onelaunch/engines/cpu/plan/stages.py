"""A network as stages: a Linear and the layers up to the next one, split into groups at every norm and residual addition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from onelaunch.engines import stages
from onelaunch.engines.cpu.code.elementwise import Operation, derivative_from_output
from onelaunch.engines.stages import Sum, UnsupportedNetworkError, cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, LayerNorm, Linear, Network


@dataclass(frozen=True)
class Add:
    """Adds the output of group `group` of stage `stage`."""

    stage: int
    group: int


@dataclass(frozen=True)
class Group:
    """A norm, an addition or None, and the elementwise operations that follow it."""

    head: BatchNorm | LayerNorm | Add | None
    operations: tuple[Operation, ...]
    tapped: bool = False  # whether a later addition takes the group's output

    @property
    def batch_norm(self) -> BatchNorm | None:
        return self.head if isinstance(self.head, BatchNorm) else None

    @property
    def layer_norm(self) -> LayerNorm | None:
        return self.head if isinstance(self.head, LayerNorm) else None

    @property
    def trains(self) -> bool:
        """Whether the group's norm has parameters."""
        if isinstance(self.head, BatchNorm):
            return self.head.affine
        return isinstance(self.head, LayerNorm) and (self.head.scale or self.head.shift)

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return tuple(operation for operation in self.operations if isinstance(operation, Dropout))


@dataclass(frozen=True)
class Stage:
    """A Linear (None for stage 0, the input) and the layers up to the next one."""

    index: int
    linear: Linear | None
    width: int
    groups: tuple[Group, ...]

    @cached_property
    def batch_norms(self) -> tuple[int, ...]:
        """The groups that begin with a BatchNorm1d, by number."""
        return tuple(number for number, group in enumerate(self.groups) if group.batch_norm)

    @cached_property
    def layer_norms(self) -> tuple[int, ...]:
        """The groups that begin with a LayerNorm, by number."""
        return tuple(number for number, group in enumerate(self.groups) if group.layer_norm)

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the Linear."""
        return len(self.groups) == 1 and not self.groups[0].operations

    def stores_derivative(self, group: int) -> bool:
        """Whether the forward stores a group's derivative. It must before another group, which overwrites its output."""
        operations = self.groups[group].operations
        return bool(operations) and (group < len(self.groups) - 1 or not derivative_from_output(operations))

    def needs_gradient(self, group: int) -> bool:
        """Whether the gradient of a group's output is used: by a Linear or by the parameters of a norm before it."""
        return self.index > 0 or any(earlier.trains for earlier in self.groups[: group + 1])


def stages_of(network: Network) -> tuple[Stage, ...]:
    """The network's stages; UnsupportedNetworkError where a BatchNorm1d and a LayerNorm follow one Linear."""
    cut = cut_into_stages(network)
    if any(isinstance(layer, LayerNorm) and layer.eps <= 0 for layer in network.layers):
        raise UnsupportedNetworkError("a LayerNorm has eps=0")  # a row past the end of a batch would become NaN
    taken = {layer for stage in cut for layer in stage.layers if isinstance(layer, Sum)}
    groups_after: dict[Sum, Add] = {}  # the group whose output is the value after some layers of a stage
    found: list[Stage] = []
    width = network.inputs
    for index, stage in enumerate(cut):
        width = stage.linear.outputs if stage.linear else width
        found.append(Stage(index, stage.linear, width, _groups(index, stage, taken, groups_after)))
        if found[-1].batch_norms and found[-1].layer_norms:
            raise UnsupportedNetworkError("a BatchNorm1d and a LayerNorm follow one Linear")
    tapped = {(add.stage, add.group) for add in map(groups_after.__getitem__, taken)}
    return tuple(
        replace(
            stage,
            groups=tuple(replace(g, tapped=(stage.index, number) in tapped) for number, g in enumerate(stage.groups)),
        )
        for stage in found
    )


def _groups(index: int, stage: stages.Stage, taken: set[Sum], groups_after: dict[Sum, Add]) -> tuple[Group, ...]:
    groups = [Group(None, ())]
    for position, layer in enumerate(stage.layers):
        groups_after[Sum(index, position)] = Add(index, len(groups) - 1)
        match layer:
            case BatchNorm() | LayerNorm():
                groups.append(Group(layer, ()))
            case Sum():
                groups.append(Group(groups_after[layer], ()))
            case Activation() | Dropout():
                if isinstance(layer, Dropout) and layer.p == 0:
                    continue
                if Sum(index, position) in taken:
                    groups.append(Group(None, ()))
                groups[-1] = Group(groups[-1].head, (*groups[-1].operations, layer))
    groups_after[Sum(index, len(stage.layers))] = Add(index, len(groups) - 1)
    return tuple(groups)
