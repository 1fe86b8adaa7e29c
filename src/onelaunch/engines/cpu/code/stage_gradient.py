"""The gradient of a stage's product: from the loss for the last stage, from the sums of dX for the others, through the
operations that follow its Linear. backward.py computes dX and dW from it."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import batch_norm, few_classes, gradient, layer_norm
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.loss import loss_rows
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.code.tile import over_panels
from onelaunch.engines.cpu.plan.plan import TALLY, Panel
from onelaunch.engines.cpu.plan.stages import Add, Stage


def loss_and_gradient(phase: Phase) -> None:
    """The loss of this partition's rows and, in training, the gradient of the last stage's product."""
    f, plan = phase.f, phase.plan
    stage = plan.last
    first, last = plan.owned_rows(phase.partition, phase.batch)
    if first == last:
        return
    if few_classes.applies(plan, training=phase.training):
        _few_classes(phase, first, last)
        return
    stop = f.minimum(phase.rows, last)
    targets, loss, tally = _loss_addresses(phase)
    outputs = phase.output(stage)
    panels = phase.buffer(f"gradient.panels.{stage.index}") if phase.training else outputs
    sums = phase.buffer("sums" if phase.training else "validation.sums")
    kernel = loss_rows(phase.module, plan, training=phase.training)
    weights = _weight_addresses(phase)
    f.call(
        kernel, outputs, targets, phase.order, sums, panels, first, stop, phase.scalars, phase.hyper, loss, tally, *weights
    )  # fmt: skip
    if phase.training:
        begin = f.intrinsic("i64", "smax.i64", stop, f.i64(first), hint="missing")
        for panel in plan.panels(stage):
            _clear_rows(phase, panel, begin, last)
        _transpose_rows(phase, stage, (first, last), derive=bool(stage.groups[-1].operations))
        if len(stage.groups) > 1 and not stage.batch_norms:
            through_groups(phase, stage, (first, last))


def _loss_addresses(phase: Phase) -> tuple[Value, Value, Value]:
    """The addresses of the targets, of the loss and of the count of correct predictions."""
    f, plan = phase.f, phase.plan
    own = phase.buffer(f"tally.{phase.partition}")
    if phase.training:
        loss = f.at(phase.buffer(f"losses.{phase.partition}"), f["j"], "double", "loss")
        f.store(Value("double", "0.0"), loss)
        return phase.control("y", "ptr"), loss, own
    values, element = (1, "i64") if plan.settings.loss == "cross_entropy" else (plan.last.width, "float")
    targets = f.at(phase.control("validation_y", "ptr"), f.mul(phase.first_row, values), element, "targets")
    loss, correct = (f.at(own, TALLY.index(name), "i64", name) for name in ("validation_loss", "validation_correct"))
    return targets, loss, correct


def _weight_addresses(phase: Phase) -> list[Value]:
    """The addresses of the rows' weights and of room for those of the batch, where a training run has weights."""
    if not (phase.training and phase.plan.settings.weighted):
        return []
    return [phase.control("weights", "ptr"), phase.buffer("row_weights")]


def _few_classes(phase: Phase, first: int, last: int) -> None:
    f, plan = phase.f, phase.plan
    stage = plan.last
    targets, loss, tally = _loss_addresses(phase)
    outputs, width = phase.output(stage), min(plan.panel_width, plan.padded(stage))
    panels = transposed = outputs
    if phase.training:
        panels, transposed = (phase.buffer(f"gradient.{kind}.{stage.index}") for kind in ("panels", "transposed"))
    weights = _weight_addresses(phase)[:1]
    wide_rows = plan.rows // plan.panel_width * plan.panel_width if phase.training else last

    def one(row: Int, batch_width: int) -> None:
        kernel = few_classes.block(phase.module, plan, training=phase.training, batch_width=batch_width)
        # These rows are columns of a batch panel: the panel's start, and the row inside it.
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
            phase.scalars, phase.hyper, loss, tally, *weights,
        )  # fmt: skip

    f.loop(min(last, wide_rows), lambda row: one(row, plan.panel_width), start=first, step=f.lanes, index="block")
    if last > wide_rows:
        one(max(first, wide_rows), plan.rows - wide_rows)


def _clear_rows(phase: Phase, panel: Panel, first: Int, last: int) -> None:
    """Set the gradient of rows past the end of a smaller last batch to zero."""
    f, plan = phase.f, phase.plan
    start = f.at(phase.buffer(f"gradient.panels.{plan.last.index}"), panel.first * plan.rows)

    def row(number: Int) -> None:
        for v in range(0, panel.width, f.lanes):
            f.store(f.zero, start, f.add(f.mul(number, panel.width), v))

    f.loop(last, row, start=first, index="row")


def _saved(stage: Stage) -> str:
    """The buffer that the derivative of a stage's last group comes from."""
    number = len(stage.groups) - 1
    if stage.stores_derivative(number):
        return f"derivative.{stage.index}.{number}"
    return f"output.{stage.index}"


def _store_and_transpose(
    phase: Phase, stage: Stage, panels: Sequence[Panel], batch_panel: Panel, rows: tuple[int, int], *, derive: bool
) -> None:
    """Transpose a gradient from panels, block by block; `derive` also multiplies by the last group's derivative."""
    f, plan = phase.f, phase.plan
    saved = phase.buffer(_saved(stage)) if derive else phase.buffer(f"gradient.panels.{stage.index}")
    source = phase.buffer(f"gradient.panels.{stage.index}")
    target = phase.buffer(f"gradient.transposed.{stage.index}")

    def panel(column: Int, width: int) -> None:
        kernel = gradient.transpose_block(
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


def _transpose_rows(phase: Phase, stage: Stage, rows: tuple[int, int], *, derive: bool) -> None:
    """Transpose these rows of a stage's gradient."""
    for batch_panel in phase.plan.batch_panels():
        if batch_panel.first < rows[1] and rows[0] < batch_panel.first + batch_panel.width:
            _store_and_transpose(phase, stage, phase.plan.panels(stage), batch_panel, rows, derive=derive)


def reduce_gradient(phase: Phase, stage: Stage) -> None:
    """Add the partial sums of dX for this partition's columns (its rows, for a stage with a LayerNorm) and take them through
    the stage, back to its product."""
    f, plan = phase.f, phase.plan
    by_rows = bool(stage.layer_norms)
    panels = plan.panels(stage) if by_rows else plan.owned_panels(stage, phase.partition)
    rows = plan.owned_rows(phase.partition, plan.rows) if by_rows else (0, plan.rows)
    if not panels or rows[0] == rows[1]:
        return
    parity = (stage.index + 1) % 2
    sources = plan.gradient_sources(stage)
    partials = [phase.buffer(f"partial.{parity}.{partition}") for partition in sources]
    first, last = panels[0].first, panels[-1].first + panels[-1].width
    for partition, partial in zip(sources, partials, strict=True):
        if partition != phase.partition and plan.stages[stage.index + 1] is not plan.last and not by_rows:
            for start, width in plan.batch_panels():
                lines = f.at(partial, start * plan.padded(stage) + first * width)
                phase.prefetch(lines, last - first, width, 0, width)
    saved = phase.output(stage) if stage.index == 0 else phase.buffer(_saved(stage))
    target = phase.buffer(f"gradient.panels.{stage.index}")
    transposed = phase.buffer(f"gradient.transposed.{stage.index}")
    back = len(stage.groups) == 1 and stage.index > 0 and plan.needs_input_gradient(stage)
    skip = _skip(phase, stage, len(stage.groups) - 1) or target

    def panel(column: Int, width: int) -> None:
        def batch_panel(row: Int, batch_width: int, blocks: Sequence[int] | None = None) -> None:
            kernel = gradient.reduce_block(
                phase.module, plan, stage, sources=len(partials), partial_width=batch_width, panel_width=width, back=back
            )  # fmt: skip
            for block in blocks or range(0, batch_width, f.lanes):
                for half in range(0, width, f.lanes):
                    unit = f.add(column, half, "unit")
                    position = f.add(f.mul(row, plan.padded(stage)), f.add(f.mul(unit, batch_width), block))
                    first = f.add(row, block)
                    inside = f.add(f.mul(column, plan.rows), f.add(f.mul(first, width), half))
                    f.call(
                        kernel,
                        *(f.at(partial, position, hint="partial") for partial in partials),
                        f.at(skip, inside, hint="skip"),
                        f.at(saved, f.add(f.mul(first, plan.pitch(stage)), unit), hint="saved"),
                        f.at(target, inside, hint="panel"),
                        f.at(transposed, position, hint="transposed"),
                    )

        owned = [p for p in plan.batch_panels() if rows[0] <= p.first and p.first + p.width <= rows[1]]
        over_panels(f, owned, batch_panel)
        for start, width_ in plan.batch_panels():  # a panel of two blocks may belong to two partitions
            blocks = [b for b in range(0, width_, f.lanes) if rows[0] <= start + b < rows[1]]
            if blocks and Panel(start, width_) not in owned:
                batch_panel(start, width_, blocks)

    over_panels(f, panels, panel)
    through_groups(phase, stage, rows)


def _skip(phase: Phase, stage: Stage, number: int) -> Value | None:
    """The gradient that reaches a group's output through additions; None if it has none, or needs none."""
    if not (stage.groups[number].tapped and stage.needs_gradient(number)):
        return None
    return phase.buffer(phase.plan.skip_buffer(stage, number))


def through_groups(phase: Phase, stage: Stage, rows: tuple[int, int] | None = None) -> None:
    """Take the gradient of this partition's columns through the stage's groups, last to first, and transpose it.

    With a LayerNorm, or after the loss, the partition has whole rows instead: those from rows[0] to rows[1].
    """
    f, plan = phase.f, phase.plan
    whole = bool(stage.layer_norms) or (stage is plan.last and not stage.batch_norms)
    panels = plan.panels(stage) if whole else plan.owned_panels(stage, phase.partition)
    first, last = rows or (0, plan.rows)
    if len(stage.groups) == 1 or not panels:
        return
    base = phase.buffer(f"gradient.panels.{stage.index}")
    stop = f.minimum(phase.rows, last)
    for number in reversed(range(1, len(stage.groups))):
        group = stage.groups[number]
        if not group.trains and not stage.needs_gradient(number - 1):
            break
        skip = _skip(phase, stage, number - 1) or base
        derivative = base
        if stage.stores_derivative(number - 1):
            derivative = phase.buffer(f"derivative.{stage.index}.{number - 1}")
        if group.layer_norm:
            kernel = layer_norm.backward(phase.module, plan, stage, number)
            names = ("normalised", "row_deviation", "scale")
            normal, deviation, scale = (phase.buffer(f"{name}.{stage.index}.{number}") for name in names)
            sums = phase.buffer(f"norm_sums.{stage.index}.{number}.{phase.partition}")
            f.call(kernel, base, skip, normal, derivative, deviation, scale, sums, first, stop)
            continue
        _through_head(phase, stage, number, panels, (first, last), skip, derivative)
    if stage.index and plan.needs_input_gradient(stage):
        for batch_panel in plan.batch_panels():
            if batch_panel.first < last and first < batch_panel.first + batch_panel.width:
                _store_and_transpose(phase, stage, panels, batch_panel, (first, last), derive=False)


def _through_head(
    phase: Phase,
    stage: Stage,
    number: int,
    panels: Sequence[Panel],
    rows: tuple[int, int],
    skip: Value,
    derivative: Value,
) -> None:
    """Take the gradient through a BatchNorm1d or an addition, and through the group before it."""
    f, plan = phase.f, phase.plan
    group, tapped = stage.groups[number], stage.groups[number - 1].tapped
    sends = plan.sends_gradient(stage, number)
    base = added = phase.buffer(f"gradient.panels.{stage.index}")
    if sends:
        assert isinstance(group.head, Add)
        added = phase.buffer(plan.skip_buffer(plan.stages[group.head.stage], group.head.group))

    def panel(column: Int, width: int) -> None:
        start = f.mul(column, plan.rows)
        before = f.at(derivative, column, hint="before")
        if group.batch_norm:
            kernel = batch_norm.backward(phase.module, plan, stage, number, width)
            normal = f.at(phase.buffer(f"normalised.{stage.index}.{number}"), column, hint="normal")
            vectors = [
                f.at(phase.buffer(f"{name}.{stage.index}.{number}"), column) for name in ("deviation", "scale", "shift")
            ]
            f.call(kernel, f.at(base, start), normal, before, *vectors, phase.rows, phase.scalars, phase.hyper)
        if sends or tapped or (stage.stores_derivative(number - 1) and not group.batch_norm):
            through = gradient.through_group(phase.module, plan, stage, number, width)
            place = f.add(start, rows[0] * width)
            pointers = [f.at(buffer, place) for buffer in (base, added, skip)]
            f.call(through, *pointers, f.at(before, rows[0] * plan.pitch(stage)), rows[1] - rows[0])

    over_panels(f, panels, panel)


def update_layer_norms(phase: Phase, stage: Stage) -> None:
    """Update scale and shift of the stage's LayerNorms, on this partition's columns, from the sums of all partitions."""
    f, plan = phase.f, phase.plan
    rows = [plan.owned_rows(partition, plan.batch) for partition in range(plan.partitions)]
    sources = [partition for partition, (first, last) in enumerate(rows) if first < last]
    for number in stage.layer_norms:
        if not stage.groups[number].trains:
            continue

        def panel(column: Int, width: int, number: int = number) -> None:
            kernel = layer_norm.update(phase.module, plan, stage, number, width, len(sources))
            names = [f"norm_sums.{stage.index}.{number}.{partition}" for partition in sources]
            names += [f"{name}.{stage.index}.{number}" for name in ("scale", "shift")]
            f.call(kernel, *(f.at(phase.buffer(name), column) for name in names), phase.scalars, phase.hyper)

        over_panels(f, plan.owned_panels(stage, phase.partition), panel)
