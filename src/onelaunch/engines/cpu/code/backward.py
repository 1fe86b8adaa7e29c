"""The products of the backward pass: dX, and dW with the optimizer's update as its epilogue; also the biases. Their operand
is the gradient that stage_gradient.py computes."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code import gradient
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gather import NextRows
from onelaunch.engines.cpu.code.instructions import Int
from onelaunch.engines.cpu.code.optimizer import Update
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.code.tile import Accumulators, Run, balanced, over_panels, over_tiles, product_tile
from onelaunch.engines.cpu.plan.plan import Panel, Plan
from onelaunch.engines.cpu.plan.stages import Stage


def input_gradient(phase: Phase, stage: Stage) -> None:
    """dX of a stage's Linear: partial sums over this partition's columns, or (last stage) full sums for its input rows."""
    f, plan = phase.f, phase.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs = stage.linear.inputs
    whole = stage is plan.last
    first, last = plan.owned_columns(before, phase.partition) if whole else (0, inputs)
    panels = plan.panels(stage) if whole else plan.owned_panels(stage, phase.partition)
    if first == last or not panels:
        return
    weights = phase.buffer(f"weight.{stage.index}")
    transposed = phase.buffer(f"gradient.transposed.{stage.index}")
    partial = phase.buffer(f"partial.{stage.index % 2}.{0 if whole else phase.partition}")
    runs, starts = _column_runs(plan, stage, panels, inputs)

    def batch_panel(row: Int, width: int) -> None:
        b = f.at(f.at(transposed, f.mul(row, plan.padded(stage))), panels[0].first * width, hint="gradient")

        def tile(rows: int, unit: Int) -> None:
            kernel = _input_gradient_tile(phase.module, rows, width, runs)
            operands = [f.at(weights, f.add(f.mul(unit, stride), start)) for start, stride in starts]
            c = f.at(f.at(partial, f.mul(row, plan.padded(before))), f.mul(unit, width), hint="partial")
            f.call(kernel, operands[0], operands[-1], b, c, c)

        over_tiles(f, first, last, plan.target.max_rows(width // f.lanes), tile)

    over_panels(f, plan.batch_panels(), batch_panel)


def _column_runs(
    plan: Plan, stage: Stage, panels: Sequence[Panel], inputs: int
) -> tuple[list[Run], list[tuple[int, int]]]:
    """How a product reads W's columns panel by panel: the runs, and (start, row stride) of each run's operand."""
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
    def epilogue(f: Function, accumulators: Accumulators) -> None:
        for m, row in enumerate(accumulators):
            for v, value in enumerate(row):
                f.store(value, f["c"], m * width + v * f.lanes)

    vectors = width // module.target.lanes
    return product_tile(
        module, "input_gradient", rows=rows, vectors=vectors, runs=runs, b_stride=width, epilogue=epilogue
    )


def weight_update(phase: Phase, stage: Stage) -> None:
    """dW of this partition's columns (last stage: input rows), with the update applied to the accumulators; also the bias."""
    f, plan = phase.f, phase.plan
    before = plan.stages[stage.index - 1]
    assert stage.linear is not None
    inputs = stage.linear.inputs
    whole = stage is plan.last
    first, last = plan.owned_columns(before, phase.partition) if whole else (0, inputs)
    panels = plan.panels(stage) if whole else plan.owned_panels(stage, phase.partition)
    activations = phase.output(before)
    gradients = phase.buffer(f"gradient.panels.{stage.index}")
    next_rows = None
    if stage.index == 1 and panels and last > first:
        height = plan.target.max_rows(panels[0].width // f.lanes)
        next_rows = NextRows(phase, len(panels) * sum(count for count, _ in balanced(last - first, height)))

    def panel(column: Int, width: int) -> None:
        b = f.at(gradients, f.mul(column, plan.rows), hint="gradient")
        weights = f.at(phase.buffer(f"weight.{stage.index}"), f.mul(column, inputs), hint="weights")

        def tile(rows: int, unit: Int) -> None:
            if next_rows:
                next_rows.prefetch_piece()
            kernel = _weight_tile(phase.module, plan, rows, width, plan.pitch(before))
            a = f.at(activations, unit, hint="inputs")
            f.call(kernel, a, phase.hyper, b, f.at(weights, f.mul(unit, width)), phase.scalars)

        over_tiles(f, first, last, plan.target.max_rows(width // f.lanes), tile)

    over_panels(f, panels, panel)

    def bias(column: Int, width: int) -> None:
        kernel = gradient.bias_update(phase.module, plan, width)
        start = f.at(gradients, f.mul(column, plan.rows), hint="panel")
        f.call(kernel, start, f.at(phase.buffer(f"bias.{stage.index}"), column), phase.scalars, phase.hyper)

    if stage.linear.bias:
        over_panels(f, plan.owned_panels(stage, phase.partition), bias)


def _weight_tile(module: Module, plan: Plan, rows: int, width: int, pitch: int) -> str:
    def before(f: Function) -> None:
        for m in range(rows):
            for v in range(0, width, max(f.lanes, 16)):
                for copy in range(1 + len(plan.state_names)):
                    f.prefetch(f["c"], copy * plan.state_stride // 4 + m * width + v, write=True)

    def epilogue(f: Function, accumulators: Accumulators) -> None:
        update = Update(f, plan, f["extra"], f["a2"])
        for m, row in enumerate(accumulators):
            for v, value in enumerate(row):
                update.apply(value, f["c"], m * width + v * f.lanes)

    return product_tile(
        module, "weight_update", rows=rows, vectors=width // module.target.lanes,
        runs=[Run(plan.batch, 1, pitch)], b_stride=width, epilogue=epilogue, before=before,
    )  # fmt: skip
