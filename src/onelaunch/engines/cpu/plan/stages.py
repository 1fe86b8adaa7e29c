"""A network as stages: a Linear and everything up to the next one, cut into groups at every BatchNorm1d."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.engines import stages
from onelaunch.engines.cpu.code.elementwise import Operation, derivative_from_output
from onelaunch.engines.stages import cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, Linear, Network


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
    found = []
    width = network.inputs
    for index, stage in enumerate(cut_into_stages(network)):
        width = stage.linear.outputs if stage.linear else width
        found.append(Stage(index, stage.linear, width, _groups(stage)))
    return tuple(found)


def _groups(stage: stages.Stage) -> tuple[Group, ...]:
    groups = [Group(None, ())]
    for layer in stage.layers:
        match layer:
            case BatchNorm():
                groups.append(Group(layer, ()))
            case Activation() | Dropout():
                if not (isinstance(layer, Dropout) and layer.p == 0):
                    groups[-1] = Group(groups[-1].norm, (*groups[-1].operations, layer))
    return tuple(groups)
