"""A phase: the work of one partition between two barriers, as a function `(arena, j)` for step j of the native call.

`Phase` gives its emitters the addresses of buffers by name and the values of the step.
"""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.plan.plan import CACHE_LINE, CONTROL, SCALARS, Plan
from onelaunch.engines.cpu.plan.stages import Stage

MAX_PREFETCHED_LINES = 512  # more would not stay in L1
PHASE_PARAMETERS = "ptr %arena, i64 %j"


class Phase:
    """`training` is False for a batch of validation rows."""

    def __init__(self, f: Function, plan: Plan, partition: int, *, training: bool) -> None:
        self.f, self.plan, self.partition, self.training = f, plan, partition, training
        self.module: Module = f.module
        self.batch = plan.batch if training else plan.settings.validation_batch
        # Computed in the first block, so that every later block may use them.
        first_row: Int = self.control("first_row") if training else 0
        self.first_row = f.add(f.mul(f["j"], self.batch), first_row, "first_row")
        rows = self.control("rows" if training else "validation_rows")
        self.rows = f.minimum(f.sub(rows, self.first_row), self.batch, "rows")
        self.scalars = f.at(self.buffer("scalars"), f.mul(f["j"], len(SCALARS)), hint="scalars")
        self.hyper = self.buffer("hyperparameters")
        self.order = (
            f.at(self.control("order", "ptr"), self.first_row, "i32", "order") if training else Value("ptr", "null")
        )

    def buffer(self, name: str) -> Value:
        hint = name.replace(".", "_")
        return self.f.at(self.f["arena"], self.plan.offset(name), "i8", hint)

    def control(self, name: str, type_: str = "i64") -> Value:
        return self.f.load(type_, self.buffer("control"), CONTROL.index(name), element="i64", hint=name)

    def step(self) -> Value:
        return self.f.i64(self.f.add(self.control("first_step"), self.f["j"], "step"))

    def input_buffer(self, next_step: bool = False) -> Value:
        """Two input buffers alternate: while one is read, the next batch is gathered into the other."""
        f = self.f
        odd = f.op("i1", f"trunc i64 {f['j'].text} to i1", "odd")
        copy = self.partition if self.plan.private_input else 0
        first, second = self.buffer(f"input.0.{copy}"), self.buffer(f"input.1.{copy}")
        return f.select(odd, first, second) if next_step else f.select(odd, second, first, "input")

    def output(self, stage: Stage) -> Value:
        """The buffer of a stage's final activations."""
        if not self.training:
            number = len(stage.groups) - 1
            kept = stage.groups[number].tapped
            return self.buffer(f"validation.kept.{stage.index}.{number}" if kept else f"validation.{stage.index % 2}")
        if stage.index == 0 and stage.is_plain:
            return self.input_buffer()
        return self.buffer(f"output.{stage.index}")

    def result(self, stage: Stage, group: int) -> Value:
        """The buffer that a group of a stage writes: one of its own if a later addition takes it, that of the next group's
        norm, or the stage's output."""
        if group < len(stage.groups) - 1:
            if stage.groups[group].tapped:
                return self.buffer(f"{'' if self.training else 'validation.'}kept.{stage.index}.{group}")
            after = stage.groups[group + 1]
            if self.training and (after.batch_norm or after.layer_norm):
                return self.buffer(f"normalised.{stage.index}.{group + 1}")
        return self.output(stage)

    def prefetch(self, start: Value, rows: int, pitch: int, first: int, last: int) -> None:
        """Prefetch floats [first, last) of each row: another core has just written these lines."""
        lines = range(first, last, CACHE_LINE // 4)
        if not 0 < rows * len(lines) <= MAX_PREFETCHED_LINES:
            return

        def row(number: Int) -> None:
            at = self.f.at(start, self.f.mul(number, pitch))
            for column in lines:
                self.f.prefetch(at, column)

        self.f.loop(rows, row, index="prefetched")

    def prefetch_columns_of_others(self, stage: Stage, start: Value, rows: int, pitch: int) -> None:
        for other in range(self.plan.partitions):
            if other != self.partition:
                self.prefetch(start, rows, pitch, *self.plan.owned_columns(stage, other))

    def forward_by_rows(self, stage: Stage) -> bool:
        statistics = self.training or any(group.batch_norm and not group.batch_norm.tracks for group in stage.groups)
        return self.plan.forward_by_rows(stage, statistics=statistics)
