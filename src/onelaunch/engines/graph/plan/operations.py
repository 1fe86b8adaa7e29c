"""What a step is made of: operations, one kernel each, and the buffers they touch. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onelaunch.engines.graph.kernels.run_arguments import Tile
from onelaunch.engines.graph.plan.memory import Layout, lifetimes, plan
from onelaunch.engines.graph.plan.narrow import Narrow

BYTES = {"uint8": 1, "int16": 2, "bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "int64": 8}


@dataclass(frozen=True)
class Space:
    """A buffer's shape and type."""

    shape: tuple[int, ...]
    kind: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.kind]


@dataclass(frozen=True)
class Operation:
    """One kernel of the step. `stage` is the Linear it works for; `uses` are the buffers it reads or writes."""

    kind: str  # one of the cases of StepRunner
    stage: int
    uses: tuple[str, ...]
    tile: Tile

    def __str__(self) -> str:
        return self.kind if self.kind.startswith("narrow") else f"{self.kind} {self.stage}"


@dataclass(frozen=True)
class StepPlan:
    operations: tuple[Operation, ...]
    evaluation: tuple[Operation, ...]
    spaces: dict[str, Space]
    kept: frozenset[str]  # buffers that live as long as the run
    small: bool
    check_part: int  # rows of validation data at a time; 0 without
    narrow: Narrow | None = None

    def layout(self) -> Layout:
        moments = [operation.uses for operation in (*self.operations, *self.evaluation)]
        return plan(lifetimes({name: space.nbytes for name, space in self.spaces.items()}, moments, self.kept))

    def last_uses(self, operations: tuple[Operation, ...]) -> list[tuple[str, ...]]:
        """For each operation, the buffers nobody needs after it."""
        last: dict[str, int] = {}
        for number, operation in enumerate(operations):
            last |= {name: number for name in operation.uses if name not in self.kept}
        return [tuple(name for name, at in last.items() if at == number) for number in range(len(operations))]
