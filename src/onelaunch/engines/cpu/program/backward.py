"""Commands of the backward pass that take the gradient through a stage: the loss, the sums of dX, norms and additions."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import batch_norm, few_classes, gradient, layer_norm, loss
from onelaunch.engines.cpu.code.elementwise import Group, field_values
from onelaunch.engines.cpu.code.gradient import Sends, Through
from onelaunch.engines.cpu.code.kernel import Address, Command, FieldValue, Unit
from onelaunch.engines.cpu.plan.division import Panel
from onelaunch.engines.cpu.plan.settings import TALLY
from onelaunch.engines.cpu.plan.skips import adds_first, sends_gradient, skip_buffer
from onelaunch.engines.cpu.plan.stages import Add, Stage
from onelaunch.engines.cpu.program.forward import prefetch
from onelaunch.engines.cpu.program.work import Work, of_one_width


def loss_and_gradient(work: Work) -> list[Command]:
    """The loss of this partition's rows and, in training, the gradient of the last stage's product."""
    plan, stage, training = work.plan, work.plan.last, work.training
    first, last = plan.owned_rows(work.partition, work.batch)
    if first == last:
        return []
    tally = Address(f"tally.{work.partition}")
    outputs = work.output(stage)[0]
    fields: dict[str, FieldValue] = {
        "outputs": outputs, "pitch": plan.pitch(stage), "targets": Address("y" if training else "validation_y"),
        "first": first, "last": last, "classes": stage.width, "inverse_classes": 1 / stage.width, "hyper": work.hyper,
        "gradient": Address(f"gradient.panels.{stage.index}") if training else outputs,
        "loss": Address(f"losses.{work.partition}") if training else _entry(tally, "validation_loss"),
        "tally": tally if training else _entry(tally, "validation_correct"),
    }  # fmt: skip
    smooths, weighted = plan.settings.label_smoothing, training and plan.settings.weighted
    fields["weights"] = Address("weights" if weighted else "zeros")
    if few_classes.applies(plan, training=training):
        transposed = Address(f"gradient.transposed.{stage.index}") if training else outputs
        wide_rows = plan.rows // plan.panel_width * plan.panel_width
        unit = Unit("few_classes", (training, smooths, weighted))
        return [few_classes.FEW_CLASSES.command(unit, transposed=transposed, wide_rows=wide_rows, **fields)]
    unit = Unit("loss", (plan.settings.loss, training, smooths, weighted))
    sums = Address("sums" if training else "validation.sums")
    vectors = plan.padded(stage) // plan.lanes
    row_weights = Address("row_weights" if weighted else "zeros")
    commands = [
        loss.LOSS.command(unit, sums=sums, row_weights=row_weights, vectors=vectors, all_rows=plan.rows, **fields)
    ]
    if training:
        commands += _transpose(work, stage, plan.panels(stage), (first, last), derive=bool(stage.groups[-1].operations))
        if not stage.batch_norms:
            commands += through_groups(work, stage, (first, last))
    return commands


def _entry(tally: Address, name: str) -> Address:
    return Address(tally.buffer, 8 * TALLY.index(name))


def _through(stage: Stage) -> tuple[Through, Group, dict[str, FieldValue], Address]:
    """How a gradient passes a stage's last group: the way, the operations that shape its code, their fields, what it reads."""
    number = len(stage.groups) - 1
    operations = stage.groups[number].operations
    if not operations:
        return "nothing", Group(()), {}, Address("zeros")
    if stage.stores_derivative(number):
        return "derivative", Group(()), {}, Address(f"derivative.{stage.index}.{number}")
    return "output", Group.of(operations), dict(field_values(operations)), Address(f"output.{stage.index}")


def _blocks(
    work: Work, stage: Stage, panels: Sequence[Panel], batch_panels: Sequence[Panel], rows: tuple[int, int]
) -> dict[str, FieldValue]:
    """The fields `gradient.BLOCKS`: panels of one width, and `rows` of each of some batch panels of one width."""
    plan = work.plan
    return {
        "panels": len(panels), "width": panels[0].width, "batch_panels": len(batch_panels),
        "batch_width": batch_panels[0].width, "first_unit": panels[0].first, "first_row": batch_panels[0].first,
        "panel": Address(f"gradient.panels.{stage.index}"), "padded": plan.padded(stage), "all_rows": plan.rows,
        "transposed": Address(f"gradient.transposed.{stage.index}"), "pitch": plan.pitch(stage),
        "first_block": rows[0], "last_block": rows[1],
    }  # fmt: skip


def _transpose(
    work: Work, stage: Stage, panels: Sequence[Panel], rows: tuple[int, int], *, derive: bool
) -> list[Command]:
    """Transpose rows of a gradient from panels; `derive` also multiplies by the last group's derivative."""
    way, group, operations, saved = _through(stage) if derive else ("nothing", Group(()), {}, Address("zeros"))
    unit, kernel = Unit("transpose", (group, way)), gradient.transpose_kernel(group)
    return [
        kernel.command(unit, saved=saved, **_blocks(work, stage, run, batch_run, blocks), **operations)
        for batch_run, blocks in _batch_runs(work, rows)
        for run in of_one_width(panels)
    ]


def reduce_gradient(work: Work, stage: Stage) -> list[Command]:
    """Add the partial sums of dX for this partition's columns (its rows, for a stage with a LayerNorm or a plan by rows) and
    take them through the stage, back to its product."""
    plan, by_rows = work.plan, bool(stage.layer_norms) or work.plan.by_rows
    panels = plan.panels(stage) if by_rows else plan.owned_panels(stage, work.partition)
    rows = plan.owned_rows(work.partition, plan.rows) if by_rows else (0, plan.rows)
    if not panels or rows[0] == rows[1]:
        return []
    sources = plan.gradient_sources(stage, work.partition)
    partials = tuple(Address(f"partial.{(stage.index + 1) % 2}.{partition}") for partition in sources)
    first, last = panels[0].first, panels[-1].first + panels[-1].width
    commands = []
    for partition, partial in zip(sources, partials, strict=True):
        if partition != work.partition and plan.stages[stage.index + 1] is not plan.last and not by_rows:
            for start, width in plan.batch_panels():
                lines = partial + (start * plan.padded(stage) + first * width)
                commands += prefetch(lines, last - first, width, 0, width)
    skip, added = _skip(work, stage, len(stage.groups) - 1), None
    way, group, operations, saved = _through(stage)
    whole = len(stage.groups) == 1
    if _ends_with_addition(work, stage):
        whole, added = True, _added(work, stage, 1)[0]
        if before := _derivative(stage, 0):
            way, saved = "derivative", before
    unit = Unit("reduce", (group, way, skip is not None, added is not None))
    kernel = gradient.reduce_kernel(group)
    shared: dict[str, FieldValue] = {
        "partials": partials, "sources": len(partials), "saved": saved, "skip": skip or Address("zeros"),
        "added": added or Address("zeros"), "back": int(whole and stage.index > 0 and plan.needs_input_gradient(stage)),
        **operations,
    }  # fmt: skip
    for run in of_one_width(panels):
        for batch_run, blocks in _batch_runs(work, rows):
            commands.append(kernel.command(unit, **_blocks(work, stage, run, batch_run, blocks), **shared))
    return commands if whole else commands + through_groups(work, stage, rows)


def _ends_with_addition(work: Work, stage: Stage) -> bool:
    """Whether a stage is f(Linear) + x, with nothing after the addition: `reduce` then takes the gradient through all of it."""
    if len(stage.groups) != 2 or not stage.index or not isinstance(stage.groups[1].head, Add):
        return False
    return not stage.groups[1].operations and not stage.groups[0].tapped and _added(work, stage, 1)[1] != "more"


def _added(work: Work, stage: Stage, number: int) -> tuple[Address | None, Sends]:
    """Where the addition at the head of a group sends its gradient, and whether it is the first to write there."""
    head, stages = stage.groups[number].head, work.plan.stages
    if not isinstance(head, Add) or not sends_gradient(stages, stage, number):
        return None, "nothing"
    address = Address(skip_buffer(stages, stages[head.stage], head.group))
    return address, "first" if adds_first(stages, stage, number) else "more"


def _batch_runs(work: Work, rows: tuple[int, int]) -> list[tuple[list[Panel], tuple[int, int]]]:
    """The batch panels of some rows, by width, and which rows of each: a panel of two blocks may belong to two partitions."""
    panels = work.plan.batch_panels()
    inside = [p for p in panels if rows[0] <= p.first and p.first + p.width <= rows[1]]
    found = [(run, (0, run[0].width)) for run in of_one_width(inside)]
    for panel in panels:
        first, last = max(panel.first, rows[0]), min(panel.first + panel.width, rows[1])
        if first < last and panel not in inside:
            found.append(([panel], (first - panel.first, last - panel.first)))
    return found


def _skip(work: Work, stage: Stage, number: int) -> Address | None:
    """The gradient that reaches a group's output through additions; None if it has none, or needs none."""
    if not (stage.groups[number].tapped and stage.needs_gradient(number)):
        return None
    return Address(skip_buffer(work.plan.stages, stage, number))


def through_groups(work: Work, stage: Stage, rows: tuple[int, int] | None = None) -> list[Command]:
    """Take the gradient of this partition's columns through the stage's groups, last to first, and transpose it.

    With a LayerNorm, after the loss, or in a plan by rows, the partition has whole rows instead: those from rows[0] to
    rows[1].
    """
    plan = work.plan
    whole = plan.by_rows or bool(stage.layer_norms) or (stage is plan.last and not stage.batch_norms)
    panels = plan.panels(stage) if whole else plan.owned_panels(stage, work.partition)
    rows = rows or (0, plan.rows)
    if len(stage.groups) == 1 or not panels:
        return []
    commands = []
    for number in reversed(range(1, len(stage.groups))):
        group = stage.groups[number]
        if not group.trains and not stage.needs_gradient(number - 1):
            break
        if group.layer_norm:
            commands.append(_through_layer_norm(work, stage, number, rows))
            continue
        for run in of_one_width(panels):
            if group.batch_norm:
                commands.append(_through_batch_norm(work, stage, number, run))
            commands += _through_head(work, stage, number, run, rows)
    if stage.index and plan.needs_input_gradient(stage):
        commands += _transpose(work, stage, panels, rows, derive=False)
    return commands


def _derivative(stage: Stage, number: int) -> Address | None:
    """The stored derivative of a group, if there is one."""
    return Address(f"derivative.{stage.index}.{number}") if stage.stores_derivative(number) else None


def _through_layer_norm(work: Work, stage: Stage, number: int, rows: tuple[int, int]) -> Command:
    plan, here = work.plan, f"{stage.index}.{number}"
    skip, before = _skip(work, stage, number - 1), _derivative(stage, number - 1)
    options = (stage.groups[number].trains, stage.needs_gradient(number - 1), skip is not None, before is not None)
    return layer_norm.BACKWARD.command(
        Unit("layer_norm_backward", options), gradient=Address(f"gradient.panels.{stage.index}"),
        skip=skip or Address("zeros"), before=before or Address("zeros"), normal=Address(f"normalised.{here}"),
        deviation=Address(f"row_deviation.{here}"), scale=work.parameter(f"scale.{here}"), first=rows[0], last=rows[1],
        sums=Address(f"norm_sums.{here}.{work.partition}"), units=stage.width, padded=plan.padded(stage),
        vectors=plan.padded(stage) // plan.lanes, pitch=plan.pitch(stage), all_rows=plan.rows, per_unit=1 / stage.width,
    )  # fmt: skip


def _through_batch_norm(work: Work, stage: Stage, number: int, run: Sequence[Panel]) -> Command:
    """Through a BatchNorm1d and, if no addition takes its output, through the group before it."""
    plan, column = work.plan, run[0].first
    layer = stage.groups[number].batch_norm
    assert layer is not None
    normal = Address(f"normalised.{stage.index}.{number}") + column
    derivative = None if stage.groups[number - 1].tapped else _derivative(stage, number - 1)
    vectors = {name: Address(f"{name}.{stage.index}.{number}") + column for name in ("deviation", "scale", "shift")}
    return batch_norm.BACKWARD.command(
        Unit("batch_norm_backward", (work.rule, layer.affine, derivative is not None)),
        gradient=Address(f"gradient.panels.{stage.index}") + column * plan.rows, panels=len(run), width=run[0].width,
        all_rows=plan.rows, normal=normal, before=derivative + column if derivative else normal, pitch=plan.pitch(stage),
        state_stride=plan.state_stride, hyper=work.hyper, **vectors,
    )  # fmt: skip


def _through_head(work: Work, stage: Stage, number: int, run: Sequence[Panel], rows: tuple[int, int]) -> list[Command]:
    """Through an addition (or a BatchNorm1d that is done) and the group before it, where that changes anything."""
    plan, group = work.plan, stage.groups[number]
    skip, before = _skip(work, stage, number - 1), _derivative(stage, number - 1)
    if group.batch_norm and skip is None:
        before = None  # done by the norm
    base = Address(f"gradient.panels.{stage.index}")
    added, sends = _added(work, stage, number)
    if sends == "nothing" and skip is None and before is None:
        return []
    column, width = run[0]
    place = column * plan.rows + rows[0] * width
    in_activations = column + rows[0] * plan.pitch(stage)
    return [gradient.THROUGH_GROUP.command(
        Unit("through_group", (sends, skip is not None, before is not None)), gradient=base + place,
        added=(added or base) + place, skip=(skip or base) + place,
        before=before + in_activations if before else base, panels=len(run),
        panel=width * plan.rows, rows=rows[1] - rows[0], width=width, pitch=plan.pitch(stage),
    )]  # fmt: skip
