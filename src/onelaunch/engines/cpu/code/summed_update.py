"""The update of parameters whose gradients are in memory as one sum per partition, added in the order of the partitions. Also
the copy of parameters and states for a partition that keeps its own."""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.optimizer import Update, UpdateRule

# `count` parameters of each panel, which are `panel` floats apart, as their gradients are in each of the `sources` sums.
SUMMED_UPDATE = Kernel(
    "summed_update",
    "list sums, i64 sources, ptr parameters, i64 panels, i64 panel, i64 count, i64 state_stride, ptr hyper",
    "scalars",
)
COPY = Kernel("copy", "ptr source, ptr target, i64 count")  # floats, a multiple of a vector's


def emit(module: Module, rule: UpdateRule) -> None:
    module.kernel(SUMMED_UPDATE, lambda f: _summed_update(f, rule))
    module.kernel(COPY, _copy)


def _copy(f: Function) -> None:
    f.loop(
        f["count"], lambda index: f.store(f.vload(f["source"], index), f["target"], index), step=f.lanes, index="vector"
    )


def _summed_update(f: Function, rule: UpdateRule) -> None:
    update = Update(f, rule, f["scalars"], f["hyper"])

    def panel(number: Int) -> None:
        start = f.mul(number, f["panel"], "start")
        copies = update.copies(f.at(f["parameters"], start), f["state_stride"])

        def vector(index: Int) -> None:
            place = f.add(start, index, "place")

            def part(source: Int) -> Value:
                return f.vload(f.load("ptr", f["sums"], source, element="i64", hint="sums"), place)

            total = f.loop(
                f["sources"], lambda n, so_far: [f.fadd(so_far, part(n))], start=1, carry=[part(0)], index="source"
            )
            update.apply(total[0], [f.at(copy, index) for copy in copies], 0)

        f.loop(f["count"], vector, step=f.lanes, index="vector")

    f.loop(f["panels"], panel, index="panel")
