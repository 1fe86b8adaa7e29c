"""The whole program of a plan: phases in order, executed by one thread or by one thread a share.

    train_alone(arena)     all shares of every phase in turn, on the calling thread
    train_share_<t>(arena) share t only, a barrier after each phase
    check_...              the same for evaluation
    row_order(...)         an epoch's permutation

Both ways of running give the same bits: a phase never reads what another share writes in the same phase.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from onelaunch.engines.cpu.code import backward, forward, stage_gradient
from onelaunch.engines.cpu.code import philox as random_bits
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gather import gather
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.phase import PHASE_PARAMETERS, Phase
from onelaunch.engines.cpu.plan.plan import CONTROL, Plan
from onelaunch.engines.cpu.threads import barrier

Emit = Callable[[Phase], None]
FLUSH_BITS = 0x8040  # flush-to-zero and denormals-are-zero of x86's MXCSR


def training_phases(plan: Plan) -> list[tuple[str, Emit]]:
    """The phases of a step. Between two of them lies a barrier, and each comment says which data it hands over."""
    phases: list[tuple[str, Emit]] = []
    stages, last = plan.stages, plan.last
    if not stages[0].is_plain:
        phases.append(("input", forward.prepare_input))  # columns of the prepared input
    for stage in stages[1:-1]:
        phases.append((f"forward_{stage.index}", partial(forward.product, stage=stage)))  # activations
    if last.norms:
        phases.append((f"forward_{last.index}", partial(forward.product, stage=last)))  # columns of the outputs
        phases.append(("loss", stage_gradient.loss_and_gradient))  # rows of the gradient
        phases.append((f"norms_{last.index}", partial(stage_gradient.through_norms, stage=last)))  # columns of it
    else:
        phases.append((f"forward_{last.index}_loss", _forward_and_loss))  # rows of the gradient
    works: list[list[Emit]] = [[]]
    for stage in reversed(stages[1:]):
        if plan.needs_input_gradient(stage):
            works[-1].append(partial(backward.input_gradient, stage=stage))
        works[-1].append(partial(backward.weight_update, stage=stage))
        if plan.needs_input_gradient(stage):
            if stage is not last:
                works.append([])  # partial sums of dX; the last stage's are whole and stay with their share
            works[-1].append(partial(stage_gradient.reduce_gradient, stage=stages[stage.index - 1]))
    works[-1].append(_gather_next)  # the next batch
    return phases + [(f"backward_{number}", partial(_in_turn, work)) for number, work in enumerate(works)]


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
    is_last = f.compare("slt", f.i64(number), phase.control("count"), "more")
    target = phase.input_buffer(next_step=True)
    order = f.at(phase.order, plan.batch, "i32", "order")
    f.when(is_last, lambda: gather(phase, target, order, following, rows))


def _gather_first(phase: Phase) -> None:
    gather(phase, phase.input_buffer(), phase.order, phase.first_row, phase.rows)


def checking_phases(plan: Plan) -> list[tuple[str, Emit]]:
    """The phases of an evaluation batch."""

    def gather_in_order(phase: Phase) -> None:
        gather(phase, phase.output(plan.stages[0]), phase.order, phase.first_row, phase.rows)

    phases: list[tuple[str, Emit]] = [("gather", gather_in_order)]
    if not plan.stages[0].is_plain:
        phases.append(("input", forward.prepare_input))
    for stage in plan.stages[1:-1]:
        phases.append((f"forward_{stage.index}", partial(forward.product, stage=stage)))
    if any(group.norm and not group.norm.tracks for group in plan.last.groups):
        phases.append((f"forward_{plan.last.index}", partial(forward.product, stage=plan.last)))
        phases.append(("loss", stage_gradient.loss_and_gradient))
    else:
        phases.append((f"forward_{plan.last.index}_loss", _forward_and_loss))
    return phases


def flush_to_zero(f: Function) -> Callable[[], None]:
    """Treat numbers below 1e-38 as zero from here to the returned call, on x86: Adam's squares decay into that range, where
    each operation costs a hundred cycles (784-128-128-128-10, batch 32: 728 µs a step without it, 241 with it)."""
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
    """The IR of a plan. `text` is the whole module."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ticks: dict[str, int] = {}
        self.module = Module(plan.target)
        random_bits.row_order(self.module)
        self._entry_points("train", training_phases(plan), training=True)
        if plan.settings.checks:
            self._entry_points("check", checking_phases(plan), training=False)
        self.text = self.module.text()

    def _tick(self, f: Function, share: int, name: str) -> None:
        """With `Settings.profile`: add the clock ticks since the last call to this name's counter in `ticks.<share>`."""
        if not self.plan.settings.profile:
            return
        place = 1 + self.ticks.setdefault(name, len(self.ticks))
        counters = f.at(f["arena"], self.plan.offset(f"ticks.{share}"), "i8", "ticks")
        now = f.intrinsic("i64", "readcyclecounter", hint="now")
        past = f.op("i64", f"sub i64 {now.text}, {f.load('i64', counters).text}", "past")
        total = f.op("i64", f"add i64 {past.text}, {f.load('i64', counters, place, element='i64').text}", "total")
        f.store(total, counters, place, element="i64")
        f.store(now, counters)

    def _phase(self, name: str, emit: Emit, share: int, training: bool) -> str:
        def make(f: Function) -> None:
            emit(Phase(f, self.plan, share, training=training))

        return self.module.function(name, PHASE_PARAMETERS, make)

    def _entry_points(self, kind: str, phases: list[tuple[str, Emit]], *, training: bool) -> None:
        plan = self.plan
        names = [
            [self._phase(f"{kind}_{name}_{share}", emit, share, training) for share in range(plan.shares)]
            for name, emit in phases
        ]
        first: list[str] = []
        if training:
            first = [self._phase(f"gather_first_{share}", _gather_first, share, True) for share in range(plan.shares)]

        def steps(f: Function, body: Callable[[Value, list[str]], None]) -> None:
            control = f.at(f["arena"], plan.offset("control"), "i8", "control")
            name = "count" if training else "check_rows"
            count: Int = f.load("i64", control, CONTROL.index(name), element="i64", hint=name)
            if not training:
                rows = plan.settings.evaluation
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
        if plan.shares > 1:
            for share in range(plan.shares):
                wait = barrier(self.module, plan, share)

                def together(f: Function, share: int = share, wait: str = wait) -> None:
                    def body(j: Value, row: list[str]) -> None:
                        f.call(row[share], f["arena"], j)
                        self._tick(f, share, row[share])
                        if training and plan.steps_overlap and (row is names[-1] or row is first):
                            return
                        f.call(wait, f["arena"])
                        self._tick(f, share, f"wait after {row[share]}")

                    steps(f, body)

                self.module.function(f"{kind}_share_{share}", "ptr %arena", together, public=True)
