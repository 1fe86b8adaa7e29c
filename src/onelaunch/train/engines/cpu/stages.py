"""A network as stages: a Linear and everything up to the next one, cut into groups at every BatchNorm1d."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.train.engines.cpu.elementwise import Operation, derivative_from_output
from onelaunch.train.network import Activation, BatchNorm, Dropout, Linear, Network


@dataclass(frozen=True)
class Group:
    """A BatchNorm1d (or none) and the element-wise operations that follow it."""

    norm: BatchNorm | None
    operations: tuple[Operation, ...]

    @property
    def dropouts(self) -> tuple[Dropout, ...]:
        return tuple(operation for operation in self.operations if isinstance(operation, Dropout))


@dataclass(frozen=True)
class Stage:
    """A Linear (none for stage 0, the input) and everything up to the next one."""

    index: int
    linear: Linear | None
    width: int
    groups: tuple[Group, ...]

    @property
    def norms(self) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.groups) if group.norm)

    @property
    def is_plain(self) -> bool:
        return len(self.groups) == 1 and not self.groups[0].operations

    def stores_derivative(self, group: int) -> bool:
        """The output of a group before a BatchNorm1d is overwritten, so its derivative cannot be read off it."""
        operations = self.groups[group].operations
        return bool(operations) and (group < len(self.groups) - 1 or not derivative_from_output(operations))


def stages_of(network: Network) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    linear: Linear | None = None
    width, norm = network.inputs, None
    groups: list[Group] = []
    operations: list[Operation] = []

    def finish() -> None:
        groups.append(Group(norm, tuple(operations)))
        stages.append(Stage(len(stages), linear, width, tuple(groups)))

    for layer in network.layers:
        match layer:
            case Linear():
                finish()
                linear, width, norm, groups, operations = layer, layer.outputs, None, [], []
            case BatchNorm():
                groups.append(Group(norm, tuple(operations)))
                norm, operations = layer, []
            case Activation():
                operations.append(layer)
            case Dropout() if layer.p > 0:
                operations.append(layer)
    finish()
    return tuple(stages)
