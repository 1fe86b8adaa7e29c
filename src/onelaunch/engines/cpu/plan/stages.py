"""A network as stages: a Linear and the layers up to the next one, split into groups at every BatchNorm1d."""

from __future__ import annotations

from dataclasses import dataclass

from onelaunch.engines import stages
from onelaunch.engines.cpu.code.elementwise import Operation, derivative_from_output
from onelaunch.engines.stages import cut_into_stages
from onelaunch.run.network import Activation, BatchNorm, Dropout, Linear, Network


@dataclass(frozen=True)
class Group:
    """A BatchNorm1d (or None) and the elementwise operations that follow it."""

    batch_norm: BatchNorm | None
    operations: tuple[Operation, ...]

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

    @property
    def batch_norms(self) -> tuple[int, ...]:
        """The groups that begin with a BatchNorm1d, by number."""
        return tuple(number for number, group in enumerate(self.groups) if group.batch_norm)

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows the Linear."""
        return len(self.groups) == 1 and not self.groups[0].operations

    def stores_derivative(self, group: int) -> bool:
        """Whether the forward stores a group's derivative. It must before a BatchNorm1d, which overwrites its output."""
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
                    groups[-1] = Group(groups[-1].batch_norm, (*groups[-1].operations, layer))
    return tuple(groups)
