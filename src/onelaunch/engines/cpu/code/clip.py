"""Clipping by the global norm: with it, dW's epilogue stores the gradient, and the update waits until the norm is known.

`squares` adds the squares of a part of the gradient in double precision. `clipped_update` scales the gradient by
min(1, clip_norm / (norm + 1e-6)), as `clip_grad_norm_` does, and applies the optimizer to it. The gradient has the layout of
the parameters, so its padding columns are left out of the norm.
"""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.optimizer import Update, UpdateRule
from onelaunch.engines.cpu.plan.settings import HYPERPARAMETERS

ROOM = 1e-6  # PyTorch's: keeps the quotient finite
# The first `used` columns of `rows` rows of each panel. `fresh`: the total starts at zero.
SQUARES = Kernel("squares", "ptr gradient, i64 panels, i64 panel, i64 rows, i64 width, i64 used, ptr total, i64 fresh")
# `count` parameters of each panel; `totals` has the sums of squares of every partition.
CLIPPED_UPDATE = Kernel(
    "clipped_update",
    "ptr parameters, i64 panels, i64 panel, i64 count, list totals, i64 partitions, i64 state_stride, ptr hyper",
    "scalars",
)


def emit(module: Module, rule: UpdateRule) -> None:
    module.kernel(SQUARES, _squares)
    module.kernel(CLIPPED_UPDATE, lambda f: _clipped_update(f, rule))


def _squares(f: Function) -> None:
    f.when(
        f.compare("ne", f["fresh"], f.i64(0), "fresh"), lambda: f.store(Value("double", "0.0"), f["total"])
    )  # fmt: skip

    def panel(number: Int) -> None:
        start = f.at(f["gradient"], f.mul(number, f["panel"]), hint="start")

        def vector(column: Int) -> None:
            mask = f.lanes_below(f.sub(f["used"], column))

            def row(index: Int, so_far: Value) -> list[Value]:
                g = f.vload(start, f.add(f.mul(index, f["width"]), column), "g")
                g = f.select(mask, g, f.zero)
                return [f.fma(g, g, so_far)]

            part = f.loop(f["rows"], row, carry=[f.zero], index="row")[0]
            more = f.op("double", f"fpext float {f.reduce('add', part).text} to double", "more")
            f.store(f.fadd(f.load("double", f["total"]), more, "total"), f["total"])

        f.loop(f["used"], vector, step=f.lanes, index="column")

    f.loop(f["panels"], panel, index="panel")


def _clipped_update(f: Function, rule: UpdateRule) -> None:
    scale = f.splat(_scale(f), "scale")
    update = Update(f, rule, f["scalars"], f["hyper"])

    def panel(number: Int) -> None:
        copies = update.copies(f.at(f["parameters"], f.mul(number, f["panel"])), f["state_stride"])

        def vector(index: Int) -> None:
            at = [f.at(copy, index) for copy in copies]
            update.step(f.fmul(f.vload(at[-1], hint="gradient"), scale), at, 0)

        f.loop(f["count"], vector, step=f.lanes, index="vector")

    f.loop(f["panels"], panel, index="panel")


def _scale(f: Function) -> Value:
    """min(1, clip_norm / (norm + 1e-6)) as a float; NaN if the norm is NaN."""

    def add(number: Int, so_far: Value) -> list[Value]:
        total = f.load("ptr", f["totals"], number, element="i64", hint="total")
        return [f.fadd(so_far, f.load("double", total), "total")]

    total = f.loop(f["partitions"], add, carry=[Value("double", "0.0")], index="partition")[0]
    root = f.intrinsic("double", "sqrt.f64", total, hint="norm")
    length = f.op("float", f"fptrunc double {root.text} to float", "norm")
    most = f.load("float", f["hyper"], HYPERPARAMETERS.index("clip_norm"), hint="clip_norm")
    ratio = f.fdiv(most, f.fadd(length, f.scalar(ROOM)), "ratio")
    return f.select(f.compare("oge", ratio, f.scalar(1.0)), f.scalar(1.0), ratio, "scale")
