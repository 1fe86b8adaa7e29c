"""What a step is made of: operations, one kernel each, and the buffers they use. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onelaunch.engines.graph.plan.memory import Layout, lifetimes, plan
from onelaunch.engines.graph.plan.narrow import Narrow
from onelaunch.kernels.gemm_tile import GemmTile

BYTES = {"uint8": 1, "int16": 2, "bf16": 2, "fp16": 2, "fp32": 4, "int32": 4, "int64": 8}
VALIDATION = "validation."  # prefix of the buffers that evaluation uses instead of training's


@dataclass(frozen=True)
class BufferSpec:
    shape: tuple[int, ...]
    dtype: str  # a key of BYTES

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Operation:
    """One kernel of the step. `stage` is the index of its Linear; `uses` names the buffers it reads or writes."""

    kind: str  # one of the cases of StepRunner
    stage: int
    uses: tuple[str, ...]
    tile: GemmTile

    def __str__(self) -> str:
        return self.kind if self.kind.startswith(("narrow", "clip_factor")) else f"{self.kind} {self.stage}"


@dataclass(frozen=True)
class StepPlan:
    operations: tuple[Operation, ...]
    evaluation: tuple[Operation, ...]
    buffers: dict[str, BufferSpec]
    persistent: frozenset[str]  # names of the buffers that keep their contents for the whole run
    small: bool
    validation_batch: int  # rows of validation data per evaluation; 0 without validation
    narrow: Narrow | None = None

    @property
    def clips(self) -> bool:
        """Whether the gradients are stored, and the update waits for their norm."""
        return "gradients" in self.buffers

    def layout(self) -> Layout:
        moments = [operation.uses for operation in (*self.operations, *self.evaluation)]
        sizes = {name: buffer.nbytes for name, buffer in self.buffers.items()}
        return plan(lifetimes(sizes, moments, self.persistent))

    def last_uses(self, operations: tuple[Operation, ...]) -> list[tuple[str, ...]]:
        """For each operation, the buffers that no later operation needs."""
        last: dict[str, int] = {}
        for number, operation in enumerate(operations):
            last |= {name: number for name in operation.uses if name not in self.persistent}
        return [tuple(name for name, at in last.items() if at == number) for number in range(len(operations))]
