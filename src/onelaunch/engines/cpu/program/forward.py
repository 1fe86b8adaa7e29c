"""Commands of the forward pass: gather the rows, then the product of each Linear and the operations that follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onelaunch.engines.cpu.code import apply, batch_norm, layer_norm, philox, product
from onelaunch.engines.cpu.code.elementwise import Group, field_values
from onelaunch.engines.cpu.code.gather import GATHER
from onelaunch.engines.cpu.code.kernel import Address, Command, FieldValue, Unit
from onelaunch.engines.cpu.code.tile import cover
from onelaunch.engines.cpu.plan.division import Panel
from onelaunch.engines.cpu.plan.stages import Add, Stage
from onelaunch.engines.cpu.plan.target import CACHE_LINE
from onelaunch.engines.cpu.program import tiles
from onelaunch.engines.cpu.program.work import Work, of_one_width
from onelaunch.integers import ceil_div, round_up

MAX_PREFETCHED_LINES = 512  # more would not stay in L1


def gather(work: Work, *, ahead: bool = False) -> list[Command]:
    """Copy the rows of this batch, or of the next one (`ahead`). Where all partitions read one copy, each writes its rows."""
    plan, training = work.plan, work.training
    first, last = (0, work.batch) if training and plan.private_input else plan.owned_rows(work.partition, work.batch)
    if first == last:
        return []
    even, odd = work.input_buffers() if training else work.output(plan.stages[0])
    return [GATHER.command(
        Unit("gather", (plan.settings.uint8_rows, training)), x=Address("x" if training else "validation_x"),
        target=odd if ahead else even, odd_target=even if ahead else odd, width=plan.stages[0].width,
        pitch=plan.pitch(plan.stages[0]), first=first, last=last, ahead=plan.batch if ahead else 0,
    )]  # fmt: skip


def prefetch(start: Address, rows: int, pitch: int, first: int, last: int) -> list[Command]:
    """Prefetch floats [first, last) of each row: another core has just written these lines."""
    lines = ceil_div(last - first, CACHE_LINE // 4)
    if not 0 < rows * lines <= MAX_PREFETCHED_LINES:
        return []
    return [product.PREFETCH.command(product.UNIT, start=start + first, rows=rows, row_bytes=4 * pitch, lines=lines)]


def draw_dropout(work: Work, stage: Stage) -> list[Command]:
    """Draw the random bits of this partition's part of a stage, for every Dropout in it."""
    first_row, rows, first_column, columns = work.plan.bits_region(stage, work.partition)
    if not work.training or not rows or not columns:
        return []
    groups = ceil_div(columns, philox.UNITS_PER_CALL)
    region: dict[str, FieldValue] = {
        "calls": rows * groups, "groups": groups, "first_row": first_row,
        "first_group": first_column // philox.UNITS_PER_CALL, "seed": Address("seed"),
    }  # fmt: skip
    layers = [dropout.layer for group in stage.groups for dropout in group.dropouts]
    return [
        philox.DRAW_BITS.command(Unit("dropout"), bits=Address(f"bits.{layer}.{work.partition}"), layer=layer, **region)
        for layer in layers
    ]


def forward(work: Work, stage: Stage) -> list[Command]:
    """Linear, bias and the operations that follow, on this partition's rows or columns."""
    plan = work.plan
    before = plan.stages[stage.index - 1]
    by_rows = work.forward_by_rows(stage)
    first, last = plan.owned_rows(work.partition, work.batch) if by_rows else (0, work.batch)
    panels = plan.panels(stage) if by_rows else plan.owned_panels(stage, work.partition)
    if first == last or not panels:
        return []
    commands = draw_dropout(work, stage)
    if work.training and before.index and not plan.by_rows:
        start = work.output(before)[0] + first * plan.pitch(before)
        for other in range(plan.partitions):
            if other != work.partition:
                commands += prefetch(start, last - first, plan.pitch(before), *plan.owned_columns(before, other))
    names = Group.of(stage.groups[0].operations).names
    in_product = names in ((), ("relu",)) and not (work.training and stage.stores_derivative(0))
    floor = 0.0 if in_product and names else -math.inf
    # What follows the product is applied to each panel while it is in L1; a LayerNorm needs whole rows.
    in_bf16 = work.training and plan.in_tiles(stage)
    numbers = range(int(in_product), 1 if stage.layer_norms else len(stage.groups))
    product_of = tiles.forward_product if in_bf16 else _product
    if in_bf16:
        commands.append(tiles.pack_inputs(work, stage, (first, last)))
    for group in of_one_width(panels):
        for run in [[panel] for panel in group] if numbers else [group]:
            commands.append(product_of(work, stage, run, (first, last), floor))
            commands += apply_groups(work, stage, run[0], (first, last), numbers)
    if stage.layer_norms:
        whole = Panel(0, plan.padded(stage))
        commands += apply_groups(work, stage, whole, (first, last), range(1, len(stage.groups)))
    return commands


def _product(work: Work, stage: Stage, panels: Sequence[Panel], rows: tuple[int, int], floor: float) -> Command:
    plan = work.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs, pitch = stage.linear.inputs, plan.pitch(stage)
    column, width = panels[0]
    even, odd = work.output(before)
    vectors = width // plan.lanes
    return product.PRODUCTS[vectors].command(
        product.UNIT, a=even, odd_a=odd, b=work.parameter(f"weight.{stage.index}") + column * inputs,
        c=work.result(stage, 0) + column, start=work.parameter(f"bias.{stage.index}") + column,
        b_panel=width * inputs, c_panel=width, start_panel=width, a_row=plan.pitch(before), c_row=pitch,
        length=inputs, repeats=1, jump=0, last_row=plan.pitch(before), last_length=inputs, floor=floor, panels=len(panels),
        **cover(*rows, plan.target.heights(vectors)),
    )  # fmt: skip


def prepare_input(work: Work) -> list[Command]:
    """Stage 0: the layers before the first Linear, on this partition's columns, or on its rows (also for a LayerNorm)."""
    plan, stage = work.plan, work.plan.stages[0]
    commands = draw_dropout(work, stage)
    raw = work.input_buffers() if work.training else work.output(stage)
    rows, parts = (0, work.batch), plan.owned_panels(stage, work.partition)
    if stage.layer_norms or plan.by_rows:
        rows, parts = plan.owned_rows(work.partition, work.batch), [Panel(0, plan.padded(stage))]
    for columns in parts if rows[0] < rows[1] else ():
        commands += apply_groups(work, stage, columns, rows, range(len(stage.groups)), source=raw)
    return commands


def apply_groups(
    work: Work, stage: Stage, columns: Panel, rows: tuple[int, int], numbers: range, *,
    source: tuple[Address, Address] | None = None,
) -> list[Command]:  # fmt: skip
    """Apply some groups of a stage, by number, to some columns of some rows: a panel, or whole rows for a LayerNorm.

    `source` has the values that group 0 takes; otherwise the product has written them where the group's result goes.
    """
    plan, training = work.plan, work.training
    position = rows[0] * plan.pitch(stage) + columns.first
    commands = []
    for number in numbers:
        layers = stage.groups[number]
        group = Group.of(layers.operations)
        result = work.result(stage, number) + position
        before = work.result(stage, number - 1) + position if number else result
        stores = training and stage.stores_derivative(number)
        fields: dict[str, FieldValue] = {
            "output": result, "pitch": plan.pitch(stage), "derivative": result,
            **field_values(layers.operations), **_bits(work, stage, number, columns),
        }  # fmt: skip
        if stores:
            fields["derivative"] = Address(f"derivative.{stage.index}.{number}") + position
        if layers.layer_norm:
            commands.append(_layer_norm(work, stage, number, rows, {"values": before, **fields}))
        elif layers.batch_norm:
            assert rows[0] == 0 or not training
            more: dict[str, FieldValue] = {"values": before, "columns": columns.width, "all_rows": rows[1] - rows[0]}
            commands.append(_batch_norm(work, stage, number, columns, position, {**more, **fields}))
        elif layers.head or group.names or source:
            even, odd = (buffer + position for buffer in source) if source and not number else (before, before)
            added, odd_added = even, odd
            if isinstance(layers.head, Add):
                addends = work.results(plan.stages[layers.head.stage], layers.head.group)
                added, odd_added = (buffer + position for buffer in addends)
            unit = Unit("apply", (group, training, stores, isinstance(layers.head, Add)))
            commands.append(apply.apply_kernel(group).command(
                unit, source=even, odd_source=odd, added=added, odd_added=odd_added, rows=rows[1] - rows[0],
                columns=columns.width, **fields,
            ))  # fmt: skip
    return commands


def _layer_norm(work: Work, stage: Stage, number: int, rows: tuple[int, int], fields: dict[str, FieldValue]) -> Command:
    plan, group = work.plan, Group.of(stage.groups[number].operations)
    layer = stage.groups[number].layer_norm
    assert layer is not None
    here = f"{stage.index}.{number}"
    normal = Address(f"normalised.{here}") + rows[0] * plan.pitch(stage) if work.training else fields["values"]
    kept = Address(f"row_deviation.{here}") + rows[0] if work.training else fields["values"]
    return layer_norm.forward_kernel(group).command(
        Unit("layer_norm", (group, work.training, work.training and stage.stores_derivative(number))), normal=normal,
        rows=rows[1] - rows[0], units=stage.width, vectors=plan.padded(stage) // plan.lanes, unit_count=float(stage.width),
        eps=layer.eps, scale=work.parameter(f"scale.{here}"), shift=work.parameter(f"shift.{here}"), deviation=kept, **fields,
    )  # fmt: skip


def _batch_norm(
    work: Work, stage: Stage, number: int, panel: Panel, position: int, fields: dict[str, FieldValue]
) -> Command:
    layer, group = stage.groups[number].batch_norm, Group.of(stage.groups[number].operations)
    assert layer is not None
    normal = Address(f"normalised.{stage.index}.{number}") + position if work.training else fields["values"]
    stores = work.training and stage.stores_derivative(number)
    vectors = {name: Address(f"{name}.{stage.index}.{number}") + panel.first for name in batch_norm.VECTORS}
    return batch_norm.forward_kernel(group).command(
        Unit("batch_norm", (group, work.training, layer.tracks, stores)), normal=normal, eps=layer.eps,
        momentum=layer.momentum or 0.0, cumulative=int(layer.momentum is None),
        batches=Address(f"batches.{stage.index}.{number}"), **vectors, **fields,
    )  # fmt: skip


def _bits(work: Work, stage: Stage, number: int, panel: Panel) -> dict[str, FieldValue]:
    """The fields of `apply.bits_fields`: where a panel's random bits begin, for each Dropout of a group."""
    _, _, first_column, columns = work.plan.bits_region(stage, work.partition)
    fields: dict[str, FieldValue] = {"bits_pitch": round_up(columns, 8)}
    for n, dropout in enumerate(stage.groups[number].dropouts):
        start = Address(f"bits.{dropout.layer}.{work.partition}", 2 * (panel.first - first_column))
        fields[f"bits{n}"] = start if work.training else Address("zeros")
    return fields
