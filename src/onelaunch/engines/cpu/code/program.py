"""The whole program of a plan: phases in order, executed by one thread or by one thread per partition.

    train_alone(arena)           all partitions of every phase in turn, on the calling thread
    train_partition_<t>(arena)   partition t only, with a barrier after each phase
    validate_...                 the same for validation
    row_order(...)               an epoch's permutation

Both ways give the same bits: a phase never reads what another partition writes in the same phase.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onelaunch.engines.cpu.code import backward, clip, forward, philox, stage_gradient
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gather import gather
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.phase import PHASE_PARAMETERS, Phase
from onelaunch.engines.cpu.plan.plan import CONTROL, Plan
from onelaunch.engines.cpu.threads import barrier

Emit = Callable[[Phase], None]
FLUSH_BITS = 0x8040  # flush-to-zero and denormals-are-zero of x86's MXCSR


def training_phases(plan: Plan) -> list[tuple[str, Emit]]:
    """The phases of a step. A barrier separates them; each comment names what the phase writes for later ones."""
    phases: list[tuple[str, Emit]] = []
    stages, last = plan.stages, plan.last
    if not stages[0].is_plain:
        phases.append(("input", forward.prepare_input))  # columns of the prepared input
    for stage in stages[1:-1]:
        phases.append((f"forward_{stage.index}", partial(forward.product, stage=stage)))  # activations
    if last.batch_norms:
        phases.append((f"forward_{last.index}", partial(forward.product, stage=last)))  # columns of the outputs
        phases.append(("loss", stage_gradient.loss_and_gradient))  # rows of the gradient
        through = partial(stage_gradient.through_groups, stage=last)
        phases.append((f"groups_{last.index}", through))  # columns of the gradient
    else:
        phases.append((f"forward_{last.index}_loss", _forward_and_loss))  # rows of the gradient
    backward_phases: list[list[Emit]] = [[]]
    for stage in reversed(stages[1:]):
        if plan.needs_input_gradient(stage):
            backward_phases[-1].append(partial(backward.input_gradient, stage=stage))
        backward_phases[-1].append(partial(backward.weight_update, stage=stage))
        if stage.layer_norms:
            backward_phases[-1].append(partial(stage_gradient.update_layer_norms, stage=stage))
        if plan.needs_input_gradient(stage):
            before = stages[stage.index - 1]
            # Partial sums of dX. Those of the last stage are complete and stay in their partition, unless it reads rows.
            if stage is not last or before.layer_norms:
                backward_phases.append([])
            backward_phases[-1].append(partial(stage_gradient.reduce_gradient, stage=before))
            if before.layer_norms:  # rows of the gradient, and sums for scale and shift
                backward_phases.append([])
    if stages[0].layer_norms:
        backward_phases[-1].append(partial(stage_gradient.update_layer_norms, stage=stages[0]))
    backward_phases[-1].append(_gather_next)  # the next batch
    phases += [(f"backward_{number}", partial(_in_turn, phase)) for number, phase in enumerate(backward_phases)]
    if plan.settings.clips:
        phases += [("norm", clip.norm), ("update", clip.update)]  # sums of squares; a part of the parameters
    return phases


def _in_turn(work: list[Emit], phase: Phase) -> None:
    for emit in work:
        emit(phase)


def _forward_and_loss(phase: Phase) -> None:
    forward.product(phase, phase.plan.last)
    stage_gradient.loss_and_gradient(phase)


def _gather_next(phase: Phase) -> None:
    f, plan = phase.f, phase.plan
    following = f.i64(f.add(phase.first_row, plan.batch, "following"))
    rows = f.minimum(f.sub(phase.control("rows"), following), plan.batch)
    number = f.add(f["j"], 1)
    has_next = f.compare("slt", f.i64(number), phase.control("count"), "more")
    target = phase.input_buffer(next_step=True)
    order = f.at(phase.order, plan.batch, "i32", "order")
    f.when(has_next, lambda: gather(phase, target, order, following, rows))


def _gather_first(phase: Phase) -> None:
    gather(phase, phase.input_buffer(), phase.order, phase.first_row, phase.rows)


def validation_phases(plan: Plan) -> list[tuple[str, Emit]]:
    """The phases of a validation batch."""

    def gather_in_order(phase: Phase) -> None:
        gather(phase, phase.output(plan.stages[0]), phase.order, phase.first_row, phase.rows)

    phases: list[tuple[str, Emit]] = [("gather", gather_in_order)]
    if not plan.stages[0].is_plain:
        phases.append(("input", forward.prepare_input))
    for stage in plan.stages[1:-1]:
        phases.append((f"forward_{stage.index}", partial(forward.product, stage=stage)))
    if any(group.batch_norm and not group.batch_norm.tracks for group in plan.last.groups):
        phases.append((f"forward_{plan.last.index}", partial(forward.product, stage=plan.last)))
        phases.append(("loss", stage_gradient.loss_and_gradient))
    else:
        phases.append((f"forward_{plan.last.index}_loss", _forward_and_loss))
    return phases


def flush_to_zero(f: Function) -> Callable[[], None]:
    """On x86, treat numbers below 1e-38 as zero, until the returned function is called.

    Adam's squares decay into that range, where each operation costs a hundred cycles (784-128-128-128-10, batch 32:
    728 µs per step without it, 241 with it).
    """
    if f.module.target.triple.split("-")[0] != "x86_64":
        return lambda: None
    before, during = (f.op("ptr", "alloca i32, align 4", name) for name in ("before", "during"))
    f.intrinsic("void", "x86.sse.stmxcsr", before)
    changed = f.op("i32", f"or i32 {f.load('i32', before).text}, {FLUSH_BITS}", "mode")
    f.store(changed, during)
    f.intrinsic("void", "x86.sse.ldmxcsr", during)

    def restore() -> None:
        f.intrinsic("void", "x86.sse.ldmxcsr", before)

    return restore


class Program:
    """The IR of a plan; `text` is the whole module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ticks: dict[str, int] = {}
        self.module = Module(plan.target)
        philox.row_order(self.module)
        self._entry_points("train", training_phases(plan), training=True)
        if plan.settings.validates:
            self._entry_points("validate", validation_phases(plan), training=False)
        self.text = self.module.text()

    def _tick(self, f: Function, partition: int, name: str) -> None:
        """With `Settings.profile`, add the clock ticks since the last call to this name's counter in `ticks.<partition>`."""
        if not self.plan.settings.profile:
            return
        counter = 1 + self.ticks.setdefault(name, len(self.ticks))
        counters = f.at(f["arena"], self.plan.offset(f"ticks.{partition}"), "i8", "ticks")
        now = f.intrinsic("i64", "readcyclecounter", hint="now")
        past = f.op("i64", f"sub i64 {now.text}, {f.load('i64', counters).text}", "past")
        total = f.op("i64", f"add i64 {past.text}, {f.load('i64', counters, counter, element='i64').text}", "total")
        f.store(total, counters, counter, element="i64")
        f.store(now, counters)

    def _phase(self, name: str, emit: Emit, partition: int, training: bool) -> str:
        def make(f: Function) -> None:
            emit(Phase(f, self.plan, partition, training=training))

        return self.module.function(name, PHASE_PARAMETERS, make)

    def _entry_points(self, kind: str, phases: list[tuple[str, Emit]], *, training: bool) -> None:
        plan, numbers = self.plan, range(self.plan.partitions)
        names = [
            [self._phase(f"{kind}_{name}_{number}", emit, number, training) for number in numbers]
            for name, emit in phases
        ]
        first: list[str] = []
        if training:
            first = [self._phase(f"gather_first_{number}", _gather_first, number, True) for number in numbers]

        def steps(f: Function, body: Callable[[Value, list[str]], None]) -> None:
            control = f.at(f["arena"], plan.offset("control"), "i8", "control")
            name = "count" if training else "validation_rows"
            count: Int = f.load("i64", control, CONTROL.index(name), element="i64", hint=name)
            if not training:
                rows = plan.settings.validation_batch
                more = f.add(count, rows - 1)
                count = f.op("i64", f"udiv i64 {f.i64(more).text}, {rows}", "batches")
            restore = flush_to_zero(f)
            if first:
                body(f.i64(0), first)

            def step(number: Int) -> None:
                for row in names:
                    body(f.i64(number), row)

            f.loop(count, step, index="step")
            restore()

        def alone(f: Function) -> None:
            def body(j: Value, row: list[str]) -> None:
                for name in row:
                    f.call(name, f["arena"], j)
                self._tick(f, 0, row[0])

            steps(f, body)

        self.module.function(f"{kind}_alone", "ptr %arena", alone, public=True)
        if plan.partitions > 1:
            for partition in numbers:
                wait = barrier(self.module, plan, partition)

                def together(f: Function, partition: int = partition, wait: str = wait) -> None:
                    def body(j: Value, row: list[str]) -> None:
                        f.call(row[partition], f["arena"], j)
                        self._tick(f, partition, row[partition])
                        if training and plan.steps_overlap and (row is names[-1] or row is first):
                            return
                        f.call(wait, f["arena"])
                        self._tick(f, partition, f"wait after {row[partition]}")

                    steps(f, body)

                self.module.function(f"{kind}_partition_{partition}", "ptr %arena", together, public=True)
