"""Commands of the backward pass for a stage's parameters: dX of its Linear, dW with the update, biases, LayerNorm vectors."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import product, update
from onelaunch.engines.cpu.code.kernel import Address, Command, Unit
from onelaunch.engines.cpu.code.summed_update import SUMMED_UPDATE
from onelaunch.engines.cpu.code.tile import COUNTS, cover
from onelaunch.engines.cpu.plan.division import Panel
from onelaunch.engines.cpu.plan.stages import Stage
from onelaunch.engines.cpu.program import tiles
from onelaunch.engines.cpu.program.work import Work, next_rows, of_one_width

# Weights of a layer that stay in L2 from one step to the next. Prefetching those costs more than it saves: dW of 784-128 at
# batch 32 took 22 % longer with Adam, 3 % with SGD. Of 784-512 at batch 128 it saves 2 to 3 %.
NEAR_BYTES = 2**20


def input_gradient(work: Work, stage: Stage) -> list[Command]:
    """dX of a stage's Linear: partial sums over this partition's columns, or (last stage) full sums for its input rows; in a
    plan by rows, full sums for its rows of the batch."""
    plan = work.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs, whole = stage.linear.inputs, stage is plan.last
    first, last, panels = _owned_weights(work, stage)
    if first == last or not panels:
        return []
    if plan.in_tiles(stage):
        return tiles.input_gradient(work, stage, panels)
    partial = Address(f"partial.{stage.index % 2}.{0 if whole and not plan.by_rows else work.partition}")
    weights, transposed = work.parameter(f"weight.{stage.index}"), Address(f"gradient.transposed.{stage.index}")
    a, rest = weights + panels[0].first * inputs, panels[-1]
    commands = []
    for run in of_one_width(plan.owned_batch_panels(work.partition)):
        row, width = run[0]
        vectors = width // plan.lanes
        # The last panel may have fewer columns, or shorter rows.
        commands.append(product.PRODUCTS[vectors].command(
            product.UNIT, a=a, odd_a=a, b=transposed + (row * plan.padded(stage) + panels[0].first * width),
            c=partial + row * plan.padded(before), start=Address("zeros"), b_panel=width * plan.padded(stage),
            c_panel=width * plan.padded(before), start_panel=0, c_row=width, a_row=plan.panel_width,
            length=plan.panel_width, repeats=len(panels), jump=inputs * plan.panel_width, last_row=rest.width,
            last_length=min(rest.width, stage.width - rest.first), floor=float("-inf"), panels=len(run),
            **cover(first, last, plan.target.heights(vectors)),
        ))  # fmt: skip
    return commands


def weight_update(work: Work, stage: Stage) -> list[Command]:
    """dW of this partition's columns (last stage: input rows), with the update applied to the accumulators; also the bias.

    In a plan by rows it is dW of this partition's rows of the batch, which is stored.
    """
    plan = work.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs = stage.linear.inputs
    first, last, panels = _owned_weights(work, stage)
    rule, stride = work.epilogue
    gradients, unit = Address(f"gradient.panels.{stage.index}"), Unit("update", (rule,))
    row, last_row = work.summed_rows
    even, odd = (buffer + row * plan.pitch(before) for buffer in work.output(before))
    # A private partition's gradients have just been read by the other core, so that a store waits for their lines.
    far = work.private or 4 * (last - first) * sum(panel.width for panel in panels) > NEAR_BYTES
    in_tiles = plan.in_tiles(stage)
    commands = tiles.weight_update(work, stage, panels) if in_tiles and panels else []
    for number, run in enumerate(of_one_width(panels) if first < last and not in_tiles else ()):
        column, width = run[0]
        vectors = width // plan.lanes
        covering = cover(first, last, plan.target.update_heights(vectors))
        commands.append(update.WEIGHT_UPDATES[vectors].command(
            unit, a=even, odd_a=odd, b=gradients + (column * plan.rows + row * width), length=last_row - row,
            b_panel=width * plan.rows,
            c=Address(f"weight.{stage.index}") + column * inputs, c_panel=width * inputs,
            a_step=plan.pitch(before), state_stride=stride, hyper=work.hyper, panels=len(run), far=int(far),
            **covering,
            **next_rows(work, len(run) * sum(covering[name] for name in COUNTS), stage.index == 1 and not number),
        ))  # fmt: skip
    owned = panels if plan.by_rows else plan.owned_panels(stage, work.partition)
    for run in of_one_width(owned) if stage.linear.bias else ():
        column, width = run[0]
        commands.append(update.BIAS_UPDATES[width // plan.lanes].command(
            unit, gradient=gradients + (column * plan.rows + row * width), bias=Address(f"bias.{stage.index}") + column,
            panels=len(run), gradient_panel=width * plan.rows, length=last_row - row, state_stride=stride, hyper=work.hyper,
        ))  # fmt: skip
    return commands


def update_layer_norms(work: Work, stage: Stage) -> list[Command]:
    """Update scale and shift of the stage's LayerNorms from the sums of all partitions: on this partition's columns, or on all
    columns of its copy."""
    plan = work.plan
    rows = [plan.owned_rows(partition, plan.batch) for partition in range(plan.partitions)]
    sources = [partition for partition, (first, last) in enumerate(rows) if first < last]
    panels = plan.panels(stage) if work.private else plan.owned_panels(stage, work.partition)
    commands = []
    for number in stage.layer_norms if panels else ():
        layer = stage.groups[number].layer_norm
        assert layer is not None
        column = panels[0].first
        for position, (name, exists) in enumerate((("scale", layer.scale), ("shift", layer.shift))):
            sums = tuple(
                Address(f"norm_sums.{stage.index}.{number}.{partition}") + (column + position * plan.padded(stage))
                for partition in sources
            )
            if exists:
                commands.append(SUMMED_UPDATE.command(
                    Unit("summed_update", (work.rule,)), sums=sums, sources=len(sums),
                    parameters=work.parameter(f"{name}.{stage.index}.{number}") + column, panels=1, panel=0,
                    count=sum(panel.width for panel in panels), state_stride=plan.state_stride, hyper=work.hyper,
                ))  # fmt: skip
    return commands


def _owned_weights(work: Work, stage: Stage) -> tuple[int, int, Sequence[Panel]]:
    """This partition's part of a stage's weights: input rows [first, last) and panels of columns.

    It has columns of its own, with all input rows; of the last stage, which has few columns, input rows with all columns.
    In a plan by rows it computes dX and dW of all weights.
    """
    plan = work.plan
    assert stage.linear is not None
    if plan.by_rows:
        return 0, stage.linear.inputs, plan.panels(stage)
    if stage is plan.last:
        return *plan.owned_columns(plan.stages[stage.index - 1], work.partition), plan.panels(stage)
    return 0, stage.linear.inputs, plan.owned_panels(stage, work.partition)
