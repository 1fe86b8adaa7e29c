"""Clipping by the global norm: with it, dW's epilogue stores the gradient, and the update waits until the norm is known.

Two phases follow the backward pass. `norm` adds the squares of each partition's part of the gradient, `update` scales the
gradient by min(1, clip_norm / (norm + 1e-6)), as `clip_grad_norm_` does, and applies the optimizer to it. Both split every
matrix by its input rows. The gradient has the layout of the parameters, so its padding columns are left out of the norm.
"""

from __future__ import annotations

from collections.abc import Callable

from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.optimizer import Update
from onelaunch.engines.cpu.code.phase import Phase
from onelaunch.engines.cpu.code.tile import over_panels
from onelaunch.engines.cpu.plan.plan import HYPERPARAMETERS, Panel, Parameter, split
from onelaunch.integers import round_up

ROOM = 1e-6  # PyTorch's: keeps the quotient finite


def _over_parts(phase: Phase, body: Callable[[Value, int, int, int], None]) -> None:
    """Call `body(address, rows, width, columns in use)` for this partition's part of every panel of every parameter."""
    f, plan = phase.f, phase.plan

    def part(parameter: Parameter, panels: list[Panel], used: int | None) -> None:
        rows = max(1, parameter.inputs)
        first, last = split(rows, plan.partitions, phase.partition)
        if first == last:
            return
        start = phase.buffer(parameter.buffer)

        def panel(column: Int, width: int) -> None:
            address = f.at(start, f.add(f.mul(column, rows), first * width), hint="part")
            body(address, last - first, width, used or width)

        over_panels(f, panels, panel)

    for parameter in plan.parameters:
        if parameter.trained:
            panels = plan.panels_of(round_up(parameter.outputs, plan.lanes))
            whole = [panel for panel in panels if panel.first + panel.width <= parameter.outputs]
            part(parameter, whole, None)
            if len(whole) < len(panels):
                part(parameter, panels[-1:], parameter.outputs - panels[-1].first)


def norm(phase: Phase) -> None:
    """The sum of the squares of this partition's part of the gradient, in double precision."""
    f = phase.f
    out = phase.buffer(f"squares.{phase.partition}")
    f.store(Value("double", "0.0"), out)
    shift = phase.plan.gradient_shift // 4

    def add(address: Value, rows: int, width: int, used: int) -> None:
        f.call(_squares(phase, width, used), f.at(address, shift), f.i64(rows), out)

    _over_parts(phase, add)


def _squares(phase: Phase, width: int, used: int) -> str:
    """`(gradient, rows, total)`: add the squares of the first `used` columns of `rows` rows to a double."""

    def make(f: Function) -> None:
        firsts = range(0, used, f.lanes)

        def row(number: Int, *sums: Value) -> list[Value]:
            at = f.at(f["gradient"], f.mul(number, width))
            found = []
            for first, so_far in zip(firsts, sums, strict=True):
                g = f.vload(at, first, "g")
                if used - first < f.lanes:
                    g = f.select(f.lanes_below(used - first), g, f.zero)
                found.append(f.fma(g, g, so_far))
            return found

        sums = f.loop(f["rows"], row, carry=[f.zero] * len(firsts), index="row")
        total = f.load("double", f["total"])
        for part in sums:
            more = f.op("double", f"fpext float {f.reduce('add', part).text} to double", "more")
            total = f.fadd(total, more, "total")
        f.store(total, f["total"])

    return phase.module.function(f"squares_w{width}_u{used}", "ptr %gradient, i64 %rows, ptr %total", make)


def update(phase: Phase) -> None:
    """Apply the optimizer to this partition's part of the clipped gradient."""
    f = phase.f
    scale = _scale(phase)
    kernel = _update_kernel(phase)

    def apply(address: Value, rows: int, width: int, used: int) -> None:
        f.call(kernel, address, f.i64(rows * width), scale, phase.scalars, phase.hyper)

    _over_parts(phase, apply)


def _scale(phase: Phase) -> Value:
    """min(1, clip_norm / (norm + 1e-6)) as a float; NaN if the norm is NaN."""
    f = phase.f
    total = f.load("double", phase.buffer("squares.0"))
    for partition in range(1, phase.plan.partitions):
        total = f.fadd(total, f.load("double", phase.buffer(f"squares.{partition}")), "total")
    root = f.intrinsic("double", "sqrt.f64", total, hint="norm")
    length = f.op("float", f"fptrunc double {root.text} to float", "norm")
    most = f.load("float", phase.hyper, HYPERPARAMETERS.index("clip_norm"), hint="clip_norm")
    ratio = f.fdiv(most, f.fadd(length, f.scalar(ROOM)), "ratio")
    return f.select(f.compare("oge", ratio, f.scalar(1.0)), f.scalar(1.0), ratio, "scale")


def _update_kernel(phase: Phase) -> str:
    plan = phase.plan

    def make(f: Function) -> None:
        scale = f.splat(f["scale"])

        def vector(index: Int) -> None:
            at = f.at(f["parameters"], index)
            gradient = f.vload(at, plan.gradient_shift // 4, "gradient")
            Update(f, plan, f["scalars"], f["hyper"]).step(f.fmul(gradient, scale), at, 0)

        f.loop(f["count"], vector, step=f.lanes, index="vector")

    parameters = "ptr %parameters, i64 %count, float %scale, ptr %scalars, ptr %hyper"
    return phase.module.function("clipped_update", parameters, make)
