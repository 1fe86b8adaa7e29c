"""BatchNorm1d over columns, one vector of them at a time. A partition owns whole columns: statistics need no exchange.

The forward computes the mean, then the variance of the centred values, in two passes over columns that are in L1. It
keeps the normalised values, mostly in their place; the backward needs only these and `deviation`, which is
1 / sqrt(variance + eps). The formulas are PyTorch's: biased variance to normalise, unbiased for the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code.apply import bits_fields, load_bits
from onelaunch.engines.cpu.code.elementwise import Group, Operations
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.optimizer import Update, UpdateRule

VECTORS = ("scale", "shift", "mean", "variance", "deviation")  # of a BatchNorm1d, one float per column each


def forward_kernel(group: Group) -> Kernel:
    """`all_rows` rows are written; `rows` of the step enter the statistics. `cumulative`: the running statistics are averages
    over all batches, of which `batches` counts those before the run."""
    vectors = ", ".join(f"ptr {name}" for name in VECTORS)
    operations = f", {group.fields}" if group.names else ""
    return Kernel(
        "normalise",
        f"ptr values, ptr normal, ptr output, ptr derivative, i64 all_rows, i64 columns, i64 pitch, {vectors}, float eps, "
        f"float momentum, i64 cumulative, ptr batches{operations}{bits_fields(group)}",
        "rows step",
    )


BACKWARD = Kernel(
    "normalise_backward",
    "ptr gradient, i64 panels, i64 width, i64 all_rows, ptr normal, ptr before, i64 pitch, ptr deviation, ptr scale, "
    "ptr shift, i64 state_stride, ptr hyper",
    "rows scalars",
)


def emit_forward(module: Module, group: Group, training: bool, tracks: bool, stores: bool) -> None:
    """`tracks`: there are running statistics. `stores`: the derivative of the group is stored too."""
    module.kernel(forward_kernel(group), lambda f: _Forward(f, group, training, tracks, stores).emit())


def emit_backward(module: Module, rule: UpdateRule, affine: bool, has_before: bool) -> None:
    """`has_before`: the group before the BatchNorm1d has a stored derivative."""
    module.kernel(BACKWARD, lambda f: _Backward(f, rule, affine, has_before).emit())


def column_sum(f: Function, rows: Int, term: Callable[[Int], Value]) -> Value:
    """Sum over rows of `term(row)`."""
    return f.loop(rows, lambda row, total: [f.fadd(total, term(row))], carry=[f.zero], index="row")[0]


class _Forward:
    def __init__(self, f: Function, group: Group, training: bool, tracks: bool, stores: bool) -> None:
        self.f, self.group, self.training, self.tracks, self.stores = f, group, training, tracks, stores

    def emit(self) -> None:
        f = self.f
        self.operations = Operations(f, self.group)
        self.row_count = f.op("float", f"sitofp i64 {f['rows'].text} to float", "rows")
        # Divide by it: multiplying by the rounded 1 / rows would shift every mean, and so the running mean, one way.
        self.count = f.splat(self.row_count, "count")
        if self.training and self.tracks:
            self.factor = f.splat(self._running_factor(), "factor")
        f.loop(f["columns"], self._column, step=f.lanes, index="column")

    def _running_factor(self) -> Value:
        """The weight of this batch in the running statistics: the momentum, or 1 / batches for a cumulative average."""
        f = self.f
        before = f.load("double", f["batches"], hint="batches")
        step = f.op("double", f"sitofp i64 {f['step'].text} to double", "step")
        count = f.fadd(f.fadd(before, step), Value("double", "1.0"), "batches")
        average = f.op("float", f"fptrunc double {f.fdiv(Value('double', '1.0'), count).text} to float", "average")
        return f.select(f.compare("ne", f["cumulative"], f.i64(0)), average, f["momentum"])

    def _column(self, column: Int) -> None:
        f = self.f

        def value(row: Int) -> Value:
            return f.vload(f["values"], f.add(f.mul(row, f["pitch"]), column))

        if self.training or not self.tracks:
            mean, deviation = self._statistics(column, value)
        else:
            mean, deviation = f.vload(f["mean"], column), self._deviation(f.vload(f["variance"], column))
        scale, shift = f.vload(f["scale"], column, "scale"), f.vload(f["shift"], column, "shift")

        def row(number: Int) -> None:
            index = f.add(f.mul(number, f["pitch"]), column)
            normal = f.fmul(f.fsub(f.vload(f["values"], index), mean), deviation, "normal")
            if self.training:
                f.store(normal, f["normal"], index)
            result = f.fma(normal, scale, shift, "value")
            bits: Sequence[Value] = load_bits(f, self.group, number, column) if self.training else ()
            self.operations.store_forward(result, bits, index, stores=self.stores)

        f.loop(f["all_rows"], row, index="row")

    def _deviation(self, variance: Value) -> Value:
        f = self.f
        sum_ = f.fadd(variance, f.splat(f["eps"], "eps"))
        return f.fdiv(f.constant(1.0), f.intrinsic(f.vector, f"sqrt.v{f.lanes}f32", sum_, hint="root"), "deviation")

    def _statistics(self, column: Int, value: Callable[[Int], Value]) -> tuple[Value, Value]:
        f = self.f
        mean = f.fdiv(column_sum(f, f["rows"], value), self.count, "mean")

        def squared(row: Int) -> Value:
            gap = f.fsub(value(row), mean, "gap")
            return f.fmul(gap, gap)

        variance = f.fdiv(column_sum(f, f["rows"], squared), self.count, "variance")
        deviation = self._deviation(variance)
        if self.training:
            f.store(deviation, f["deviation"], column)
        if self.training and self.tracks:
            unbiased = f.splat(f.fdiv(self.row_count, f.fsub(self.row_count, f.scalar(1.0))), "unbiased")
            old = f.fsub(f.constant(1.0), self.factor)
            for running, now in (("mean", mean), ("variance", f.fmul(variance, unbiased))):
                kept = f.fmul(old, f.vload(f[running], column))
                f.store(f.fma(self.factor, now, kept, running), f[running], column)
        return mean, deviation


class _Backward:
    """Takes the gradient in panels through BatchNorm1d, in place, and through the group before it. Scale and shift are
    updated here too; the gradient uses their old values."""

    def __init__(self, f: Function, rule: UpdateRule, affine: bool, has_before: bool) -> None:
        self.f, self.rule, self.affine, self.has_before = f, rule, affine, has_before

    def emit(self) -> None:
        f = self.f
        self.update = Update(f, self.rule, f["scalars"], f["hyper"])
        rows = f.op("float", f"sitofp i64 {f['rows'].text} to float", "rows")
        self.per_row = f.splat(f.fdiv(f.scalar(1.0), rows), "per_row")

        def panel(number: Int) -> None:
            first = f.mul(number, f["width"])
            start = f.at(f["gradient"], f.mul(first, f["all_rows"]), hint="panel")
            f.loop(
                f["width"], lambda half: self._column(f.at(start, half), f.add(first, half)), step=f.lanes, index="half"
            )

        f.loop(f["panels"], panel, index="panel")

    def _column(self, start: Value, column: Int) -> None:
        f = self.f

        def gradient(row: Int) -> Value:
            return f.vload(start, f.mul(row, f["width"]))

        def position(row: Int) -> Int:
            return f.add(f.mul(row, f["pitch"]), column)

        def normal(row: Int) -> Value:
            return f.vload(f["normal"], position(row))

        shift_gradient = column_sum(f, f["rows"], gradient)
        scale_gradient = column_sum(f, f["rows"], lambda row: f.fmul(gradient(row), normal(row)))
        scale = f.at(f["scale"], column, hint="scale")
        factor = f.fmul(f.vload(scale), f.vload(f["deviation"], column), "factor")
        if self.affine:
            for address, total in ((scale, scale_gradient), (f.at(f["shift"], column), shift_gradient)):
                self.update.apply(total, self.update.copies(address, f["state_stride"]), 0)
        mean_shift, mean_scale = f.fmul(shift_gradient, self.per_row), f.fmul(scale_gradient, self.per_row)

        def row(number: Int) -> None:
            centred = f.fsub(gradient(number), mean_shift)
            centred = f.fsub(centred, f.fmul(normal(number), mean_scale))
            result = f.fmul(centred, factor)
            if self.has_before:
                result = f.fmul(result, f.vload(f["before"], position(number)))
            f.store(result, start, f.mul(number, f["width"]))

        f.loop(f["rows"], row, index="row")
