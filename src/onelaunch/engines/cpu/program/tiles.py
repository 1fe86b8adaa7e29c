"""Commands of products in AMX tiles: pack the operands in bf16, then multiply. Each partition packs for itself, so that phases
and barriers are those of the products in fp32."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import pack, tile_products
from onelaunch.engines.cpu.code.kernel import Address, Command, FieldValue, Unit
from onelaunch.engines.cpu.code.pack import BLOCK, STEP_BYTES, TERMS
from onelaunch.engines.cpu.code.tile_products import STEP_OF_PAIRS
from onelaunch.engines.cpu.plan.division import Panel
from onelaunch.engines.cpu.plan.layout import packed_row_bytes
from onelaunch.engines.cpu.plan.stages import Stage
from onelaunch.engines.cpu.program.work import Work, next_rows, of_one_width
from onelaunch.integers import ceil_div


def _unit(work: Work) -> Unit:
    return Unit("tile_products", (work.plan.settings.planes,))


def _shared(work: Work, left_row: int, left_plane: int, plane: int, steps: int) -> dict[str, FieldValue]:
    here = work.partition
    return {
        "left": Address(f"packed.left.{here}"), "left_row": left_row, "left_plane": left_plane,
        "right": Address(f"packed.right.{here}"), "plane": plane, "steps": steps, "block": Address(f"block.{here}"),
    }  # fmt: skip


def pack_inputs(work: Work, stage: Stage, rows: tuple[int, int]) -> Command:
    """The rows of a stage's inputs that this partition multiplies, as left operand."""
    plan = work.plan
    before = plan.stages[stage.index - 1]
    even, odd = work.output(before)
    steps, row, plane = _left_of_rows(work, before.width, rows[1] - rows[0])
    pitch = plan.pitch(before)
    return pack.PACK_ROWS.command(
        _unit(work), source=even, odd_source=odd, source_row=pitch, source_step=TERMS, last_row=pitch,
        last_columns=before.width - TERMS * (steps - 1), first=rows[0], rows=rows[1] - rows[0], steps=steps,
        target=Address(f"packed.left.{work.partition}"), row_bytes=row, step_bytes=STEP_BYTES, plane=plane,
    )  # fmt: skip


def _left_of_rows(work: Work, terms: int, rows: int) -> tuple[int, int, int]:
    """(steps, bytes of a row, bytes of a plane) of a left operand whose rows have `terms` terms."""
    steps = ceil_div(terms, TERMS)
    row = packed_row_bytes(steps)
    return steps, row, row * BLOCK * ceil_div(rows, BLOCK)


def forward_product(work: Work, stage: Stage, run: Sequence[Panel], rows: tuple[int, int], floor: float) -> Command:
    """A stage's product and bias, in panels of one width; `pack_inputs` comes first."""
    plan = work.plan
    assert stage.linear is not None
    column, width = run[0]
    inputs = stage.linear.inputs
    steps, row, plane = _left_of_rows(work, inputs, rows[1] - rows[0])
    return tile_products.FORWARD.command(
        _unit(work), weights=Address(f"weight.{stage.index}") + column * inputs, weights_panel=width * inputs,
        panels=len(run), width=width, rows=inputs, bias=Address(f"bias.{stage.index}") + column,
        c=work.result(stage, 0) + (rows[0] * plan.pitch(stage) + column), c_row=plan.pitch(stage),
        batch_rows=rows[1] - rows[0], floor=floor, **_shared(work, row, plane, STEP_OF_PAIRS * steps, steps),
    )  # fmt: skip


def input_gradient(work: Work, stage: Stage, panels: Sequence[Panel]) -> list[Command]:
    """Partial sums of dX over this partition's columns."""
    plan, planes = work.plan, work.plan.settings.planes
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs, first, rest = stage.linear.inputs, panels[0].first, panels[-1]
    steps = len(panels)
    left_step, plane = BLOCK * STEP_BYTES, STEP_OF_PAIRS * steps
    weights, transposed = Address(f"weight.{stage.index}"), Address(f"gradient.transposed.{stage.index}")
    partial = Address(f"partial.{stage.index % 2}.{work.partition}")
    commands = []
    for run in of_one_width(plan.batch_panels()):
        row, width = run[0]
        commands.append(pack.PACK_PAIRS.command(
            _unit(work), source=transposed + (row * plan.padded(stage) + first * width), panels=len(run),
            source_panel=width * plan.padded(stage), width=width, rows=min(rest.first + rest.width, stage.width) - first,
            steps=steps, target=Address(f"packed.right.{work.partition}"), target_panel=plane * planes, plane=plane,
        ))  # fmt: skip
        commands.append(tile_products.INPUT_GRADIENT.command(
            _unit(work), weights=weights + first * inputs, source_row=plan.panel_width,
            source_step=inputs * plan.panel_width, last_row=rest.width, last_columns=min(rest.width, stage.width - rest.first),
            step_bytes=left_step, right_panel=plane * planes, panels=len(run), first=0, last=inputs,
            c=partial + row * plan.padded(before), c_panel=width * plan.padded(before), width=width,
            **_shared(work, STEP_BYTES, left_step * steps, plane, steps),
        ))  # fmt: skip
    return commands


def weight_update(work: Work, stage: Stage, panels: Sequence[Panel]) -> list[Command]:
    """dW of this partition's columns, with the update of the weights."""
    plan, planes = work.plan, work.plan.settings.planes
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs = stage.linear.inputs
    even, odd = work.output(before)
    steps, left_row, left_plane = _left_of_rows(work, plan.batch, inputs)
    plane = STEP_OF_PAIRS * steps
    commands = [pack.PACK_TRANSPOSED.command(
        _unit(work), source=even, odd_source=odd, source_row=plan.pitch(before), rows=plan.batch, columns=inputs,
        steps=steps, target=Address(f"packed.left.{work.partition}"), row_bytes=left_row, plane=left_plane,
    )]  # fmt: skip
    for number, run in enumerate(of_one_width(panels)):
        column, width = run[0]
        blocks = len(run) * ceil_div(inputs, BLOCK)
        commands.append(pack.PACK_PAIRS.command(
            _unit(work), source=Address(f"gradient.panels.{stage.index}") + column * plan.rows, panels=len(run),
            source_panel=width * plan.rows, width=width, rows=plan.batch, steps=steps,
            target=Address(f"packed.right.{work.partition}"), target_panel=plane * planes, plane=plane,
        ))  # fmt: skip
        commands.append(tile_products.WEIGHT_UPDATE.command(
            Unit("tile_update", (planes, work.rule)), right_panel=plane * planes, panels=len(run), width=width, first=0,
            last=inputs, weights=Address(f"weight.{stage.index}") + column * inputs, weights_panel=width * inputs,
            state_stride=plan.state_stride, hyper=work.hyper,
            **next_rows(work, blocks, stage.index == 1 and not number),
            **_shared(work, left_row, left_plane, plane, steps),
        ))  # fmt: skip
    return commands
