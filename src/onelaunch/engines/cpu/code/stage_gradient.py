"""The gradient of a stage's product: of the last stage from the loss, of one before from the sums of dX, through what follows
its Linear. backward.py makes dX and dW of it."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import batch_norm as norm
from onelaunch.engines.cpu.code import few_classes, gradient
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.loss import loss_rows
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.code.tile import over_panels
from onelaunch.engines.cpu.plan.plan import Panel
from onelaunch.engines.cpu.plan.stages import Stage


def loss_and_gradient(phase: Phase) -> None:
    """This share's rows: their loss and, in training, the gradient of the last stage's product."""
    f, plan = phase.f, phase.plan
    stage = plan.last
    first, last = plan.owned_rows(phase.share, phase.batch)
    if first == last:
        return
    if few_classes.applies(plan, training=phase.training):
        _few_classes(phase, first, last)
        return
    stop = f.minimum(phase.rows, last)
    targets, loss, tally = _loss_places(phase)
    outputs = phase.output(stage)
    panels = phase.buffer(f"gradient.panels.{stage.index}") if phase.training else outputs
    sums = phase.buffer("sums" if phase.training else "check.sums")
    kernel = loss_rows(phase.module, plan, training=phase.training)
    f.call(kernel, outputs, targets, phase.order, sums, panels, first, stop, phase.scalars, phase.hyper, loss, tally)
    if phase.training:
        begin = f.intrinsic("i64", "smax.i64", stop, f.i64(first), hint="missing")
        for panel in plan.panels(stage):
            _clear_rows(phase, panel, begin, last)
        derive = bool(stage.groups[-1].operations)
        for batch_panel in plan.batch_panels():
            if batch_panel.first < last and first < batch_panel.first + batch_panel.width:
                _settle(phase, stage, plan.panels(stage), batch_panel, (first, last), derive=derive)


def _loss_places(phase: Phase) -> tuple[Value, Value, Value]:
    """Where targets are read, where the loss and where the right predictions are added."""
    f, plan = phase.f, phase.plan
    own = phase.buffer(f"tally.{phase.share}")
    if phase.training:
        loss = f.at(phase.buffer(f"losses.{phase.share}"), f["j"], "double", "loss")
        f.store(Value("double", "0.0"), loss)
        return phase.control("y", "ptr"), loss, own
    values, element = (1, "i64") if plan.settings.loss == "cross_entropy" else (plan.last.width, "float")
    targets = f.at(phase.control("check_y", "ptr"), f.mul(phase.first_row, values), element, "targets")
    return targets, f.at(own, 1, "double", "loss"), f.at(own, 2, "i64", "tally")


def _few_classes(phase: Phase, first: int, last: int) -> None:
    f, plan = phase.f, phase.plan
    stage = plan.last
    targets, loss, tally = _loss_places(phase)
    outputs, width = phase.output(stage), min(plan.panel_width, plan.padded(stage))
    panels = transposed = outputs
    if phase.training:
        panels, transposed = (phase.buffer(f"gradient.{kind}.{stage.index}") for kind in ("panels", "transposed"))
    wide_rows = plan.rows // plan.panel_width * plan.panel_width if phase.training else last

    def one(row: Int, batch_width: int) -> None:
        kernel = few_classes.block(phase.module, plan, training=phase.training, batch_width=batch_width)
        # The place of these rows' columns among batch panels: a panel's start, and the row inside it.
        if isinstance(row, int):
            inside: Int = row % plan.panel_width
        else:
            inside = f.op("i64", f"and i64 {row.text}, {plan.panel_width - 1}", "inside")
        start = f.mul(f.sub(row, inside), plan.padded(stage))
        f.call(
            kernel, f.at(outputs, f.mul(row, plan.pitch(stage))), targets if phase.training else f.at(targets, row, "i64"),
            f.at(phase.order, row, "i32") if phase.training else phase.order, f.i64(f.sub(phase.rows, row)),
            f.at(panels, f.mul(row, width)) if phase.training else panels,
            f.at(transposed, f.add(start, inside)) if phase.training else panels,
            phase.scalars, phase.hyper, loss, tally,
        )  # fmt: skip

    f.loop(min(last, wide_rows), lambda row: one(row, plan.panel_width), start=first, step=f.lanes, index="block")
    if last > wide_rows:
        one(max(first, wide_rows), plan.rows - wide_rows)


def _clear_rows(phase: Phase, panel: Panel, first: Int, last: int) -> None:
    """Rows that a last, smaller batch lacks have no gradient."""
    f, plan = phase.f, phase.plan
    start = f.at(phase.buffer(f"gradient.panels.{plan.last.index}"), panel.first * plan.rows)

    def row(number: Int) -> None:
        for v in range(0, panel.width, f.lanes):
            f.store(f.zero, start, f.add(f.mul(number, panel.width), v))

    f.loop(last, row, start=first, index="row")


def _saved(phase: Phase, stage: Stage) -> str:
    number = len(stage.groups) - 1
    if stage.stores_derivative(number):
        return f"derivative.{stage.index}.{number}"
    return f"output.{stage.index}"


def _settle(
    phase: Phase, stage: Stage, panels: Sequence[Panel], batch_panel: Panel, rows: tuple[int, int], *, derive: bool
) -> None:
    """Transpose a gradient from panels, block by block (and multiply by the last group's derivative)."""
    f, plan = phase.f, phase.plan
    saved = phase.buffer(_saved(phase, stage)) if derive else phase.buffer(f"gradient.panels.{stage.index}")
    source = phase.buffer(f"gradient.panels.{stage.index}")
    target = phase.buffer(f"gradient.transposed.{stage.index}")

    def panel(column: Int, width: int) -> None:
        kernel = gradient.settle_block(
            phase.module, plan, stage, panel_width=width, batch_width=batch_panel.width, derive=derive
        )
        for block in range(batch_panel.first, batch_panel.first + batch_panel.width, f.lanes):
            if not rows[0] <= block < rows[1]:
                continue
            for half in range(0, width, f.lanes):
                unit = f.add(column, half)
                f.call(
                    kernel,
                    f.at(f.at(saved, block * plan.pitch(stage)), unit) if derive else saved,
                    f.at(f.at(source, f.mul(column, plan.rows)), block * width + half),
                    f.at(f.at(target, batch_panel.first * plan.padded(stage)),
                         f.add(f.mul(unit, batch_panel.width), block - batch_panel.first)),
                )  # fmt: skip

    over_panels(f, panels, panel)


def reduce_gradient(phase: Phase, stage: Stage) -> None:
    """Add the partial sums of dX for this share's columns and take them through the stage, down to its product."""
    f, plan = phase.f, phase.plan
    panels = plan.owned_panels(stage, phase.share)
    if not panels:
        return
    parity = (stage.index + 1) % 2
    sources = plan.gradient_sources(stage)
    partials = [phase.buffer(f"partial.{parity}.{share}") for share in sources]
    first, last = panels[0].first, panels[-1].first + panels[-1].width
    for share, partial in zip(sources, partials, strict=True):
        if share != phase.share and plan.stages[stage.index + 1] is not plan.last:
            for start, width in plan.batch_panels():
                rows = f.at(partial, start * plan.padded(stage) + first * width)
                phase.fetch(rows, last - first, width, 0, width)
    saved = phase.output(stage) if stage.index == 0 else phase.buffer(_saved(phase, stage))
    target = phase.buffer(f"gradient.panels.{stage.index}")
    transposed = phase.buffer(f"gradient.transposed.{stage.index}")
    back = not stage.norms and stage.index > 0 and plan.needs_input_gradient(stage)

    def panel(column: Int, width: int) -> None:
        def batch_panel(row: Int, batch_width: int) -> None:
            kernel = gradient.reduce_block(
                phase.module,
                plan,
                stage,
                sources=len(partials),
                partial_width=batch_width,
                panel_width=width,
                back=back,
            )
            for block in range(0, batch_width, f.lanes):
                for half in range(0, width, f.lanes):
                    unit = f.add(column, half, "unit")
                    place = f.add(f.mul(row, plan.padded(stage)), f.add(f.mul(unit, batch_width), block))
                    first = f.add(row, block)
                    inside = f.add(f.mul(first, width), half)
                    f.call(
                        kernel,
                        *(f.at(partial, place, hint="partial") for partial in partials),
                        f.at(saved, f.add(f.mul(first, plan.pitch(stage)), unit), hint="saved"),
                        f.at(target, f.add(f.mul(column, plan.rows), inside), hint="panel"),
                        f.at(transposed, place, hint="transposed"),
                    )

        over_panels(f, plan.batch_panels(), batch_panel)

    over_panels(f, panels, panel)
    through_norms(phase, stage)


def through_norms(phase: Phase, stage: Stage) -> None:
    """The gradient of this share's columns through the stage's BatchNorm1ds, last to first, then transposed."""
    f, plan = phase.f, phase.plan
    panels = plan.owned_panels(stage, phase.share)
    if not stage.norms or not panels:
        return

    def panel(column: Int, width: int) -> None:
        start = f.at(phase.buffer(f"gradient.panels.{stage.index}"), f.mul(column, plan.rows), hint="panel")
        for number in reversed(stage.norms):
            kernel = norm.backward(phase.module, plan, stage, number, width)
            normal = f.at(phase.buffer(f"normal.{stage.index}.{number}"), column, hint="normal")
            before = normal
            if stage.stores_derivative(number - 1):
                before = f.at(phase.buffer(f"derivative.{stage.index}.{number - 1}"), column, hint="before")
            vectors = [
                f.at(phase.buffer(f"{name}.{stage.index}.{number}"), column) for name in ("deviation", "scale", "shift")
            ]
            f.call(kernel, start, normal, before, *vectors, phase.rows, phase.scalars, phase.hyper)

    over_panels(f, panels, panel)
    if stage.index and plan.needs_input_gradient(stage):
        for batch_panel in plan.batch_panels():
            _settle(phase, stage, panels, batch_panel, (0, plan.rows), derive=False)
