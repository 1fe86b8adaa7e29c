"""The backward half of a step: dX, dW with the update inside, biases, and the way of a gradient through a stage."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.train.engines.cpu import few_classes, gradient, norm
from onelaunch.train.engines.cpu.emit import Function, Int, Module, Value
from onelaunch.train.engines.cpu.gather import NextRows
from onelaunch.train.engines.cpu.loss import loss_rows
from onelaunch.train.engines.cpu.optimizer import Update
from onelaunch.train.engines.cpu.phase import Phase
from onelaunch.train.engines.cpu.plan import Panel, Plan
from onelaunch.train.engines.cpu.stages import Stage
from onelaunch.train.engines.cpu.tile import Accumulators, Run, balanced, over_panels, over_tiles, product_tile


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


def input_gradient(phase: Phase, stage: Stage) -> None:
    """dX of a stage's Linear: partial sums over this share's columns, or (last stage) whole sums for its input rows."""
    f, plan = phase.f, phase.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs = stage.linear.inputs
    whole = stage is plan.last
    first, last = plan.owned_columns(before, phase.share) if whole else (0, inputs)
    panels = plan.panels(stage) if whole else plan.owned_panels(stage, phase.share)
    if first == last or not panels:
        return
    weights = phase.buffer(f"weight.{stage.index}")
    transposed = phase.buffer(f"gradient.transposed.{stage.index}")
    partial = phase.buffer(f"partial.{stage.index % 2}.{0 if whole else phase.share}")
    runs, starts = _column_runs(plan, stage, panels, inputs)

    def batch_panel(row: Int, width: int) -> None:
        b = f.at(f.at(transposed, f.mul(row, plan.padded(stage))), panels[0].first * width, hint="gradient")

        def tile(rows: int, unit: Int) -> None:
            kernel = _input_gradient_tile(phase.module, rows, width, runs)
            operands = [f.at(weights, f.add(f.mul(unit, stride), start)) for start, stride in starts]
            c = f.at(f.at(partial, f.mul(row, plan.padded(before))), f.mul(unit, width), hint="partial")
            f.call(kernel, operands[0], operands[-1], b, c, c)

        over_tiles(f, first, last, plan.target.most_rows(width // f.lanes), tile)

    over_panels(f, plan.batch_panels(), batch_panel)


def _column_runs(
    plan: Plan, stage: Stage, panels: Sequence[Panel], inputs: int
) -> tuple[list[Run], list[tuple[int, int]]]:
    """How a product walks along W's columns through its panels: runs, and (start, row stride) of each run's operand."""
    whole = [panel for panel in panels if panel.width == plan.panel_width and panel.first + panel.width <= stage.width]
    runs, starts = [], []
    if whole:
        width = plan.panel_width
        runs.append(Run(width, width, 1, repeats=len(whole), jump=inputs * width))
        starts.append((whole[0].first * inputs, width))
    if len(whole) < len(panels):
        rest = panels[-1]
        runs.append(Run(stage.width - rest.first, rest.width, 1))
        starts.append((rest.first * inputs, rest.width))
    return runs, starts


def _input_gradient_tile(module: Module, rows: int, width: int, runs: Sequence[Run]) -> str:
    def finish(f: Function, accumulators: Accumulators) -> None:
        for m, row in enumerate(accumulators):
            for v, value in enumerate(row):
                f.store(value, f["c"], m * width + v * f.lanes)

    vectors = width // module.target.lanes
    return product_tile(module, "input_gradient", rows=rows, vectors=vectors, runs=runs, b_stride=width, finish=finish)


def weight_update(phase: Phase, stage: Stage) -> None:
    """dW of this share's columns (last stage: input rows), the optimizer's step taken on the accumulators; the bias too."""
    f, plan = phase.f, phase.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs = stage.linear.inputs
    whole = stage is plan.last
    first, last = plan.owned_columns(before, phase.share) if whole else (0, inputs)
    panels = plan.panels(stage) if whole else plan.owned_panels(stage, phase.share)
    activations = phase.output(before)
    gradients = phase.buffer(f"gradient.panels.{stage.index}")
    upcoming = None
    if stage.index == 1 and panels and last > first:
        height = plan.target.most_rows(panels[0].width // f.lanes)
        upcoming = NextRows(phase, len(panels) * sum(count for count, _ in balanced(last - first, height)))

    def panel(column: Int, width: int) -> None:
        b = f.at(gradients, f.mul(column, plan.rows), hint="gradient")
        weights = f.at(phase.buffer(f"weight.{stage.index}"), f.mul(column, inputs), hint="weights")

        def tile(rows: int, unit: Int) -> None:
            if upcoming:
                upcoming.ask()
            kernel = _weight_tile(phase.module, plan, rows, width, plan.pitch(before))
            a = f.at(activations, unit, hint="inputs")
            f.call(kernel, a, phase.hyper, b, f.at(weights, f.mul(unit, width)), phase.scalars)

        over_tiles(f, first, last, plan.target.most_rows(width // f.lanes), tile)

    over_panels(f, panels, panel)

    def bias(column: Int, width: int) -> None:
        kernel = gradient.bias_update(phase.module, plan, width)
        start = f.at(gradients, f.mul(column, plan.rows), hint="panel")
        f.call(kernel, start, f.at(phase.buffer(f"bias.{stage.index}"), column), phase.scalars, phase.hyper)

    if stage.linear.bias:
        over_panels(f, plan.owned_panels(stage, phase.share), bias)


def _weight_tile(module: Module, plan: Plan, rows: int, width: int, pitch: int) -> str:
    def before(f: Function) -> None:
        for m in range(rows):
            for v in range(0, width, max(f.lanes, 16)):
                for copy in range(1 + len(plan.state_names)):
                    f.prefetch(f["c"], copy * plan.state_stride // 4 + m * width + v, write=True)

    def finish(f: Function, accumulators: Accumulators) -> None:
        update = Update(f, plan, f["extra"], f["a2"])
        for m, row in enumerate(accumulators):
            for v, value in enumerate(row):
                update.apply(value, f["c"], m * width + v * f.lanes)

    return product_tile(
        module, "weight_update", rows=rows, vectors=width // module.target.lanes,
        runs=[Run(plan.batch, 1, pitch)], b_stride=width, finish=finish, before=before,
    )  # fmt: skip
