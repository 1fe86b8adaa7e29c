"""BatchNorm1d over one panel. A partition owns whole columns, so statistics need no exchange.

The forward computes the mean, then the variance of the centred values, in two passes over a panel that is in L1. It
keeps the normalised values, mostly in their place; the backward needs only these and `deviation`, which is
1 / sqrt(variance + eps). The formulas are PyTorch's: biased variance to normalise, unbiased for the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code import elementwise
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.optimizer import Update
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.stages import Stage
from onelaunch.run.network import BatchNorm


def row_vectors(f: Function, width: int) -> range:
    """The first column of every vector of a row."""
    return range(0, width, f.lanes)


def column_sums(f: Function, rows: Int, width: int, term: Callable[[Int, int], Value]) -> list[Value]:
    """Sum over rows of `term(row, column)`, one vector per `lanes` columns."""

    def body(row: Int, *sums: Value) -> list[Value]:
        return [f.fadd(so_far, term(row, c)) for so_far, c in zip(sums, row_vectors(f, width), strict=True)]

    return f.loop(rows, body, carry=[f.zero] * len(row_vectors(f, width)), index="row")


def load_bits(f: Function, pointers: Sequence[Value], row: Int, column: Int) -> list[Value]:
    """The dropout bits of one vector, for each Dropout of a group, from bits `[row][bits_pitch]`."""
    index = f.add(f.mul(row, f["bits_pitch"]), column)
    return [f.load(f"<{f.lanes} x i16>", pointer, index, element="i16", hint="bits") for pointer in pointers]


FORWARD_PARAMETERS = (
    "ptr %values, ptr %normal, ptr %output, ptr %derivative, i64 %bits_pitch, ptr %scale, ptr %shift, ptr %mean, "
    "ptr %variance, ptr %deviation, i64 %rows, float %factor"
)


def forward(module: Module, plan: Plan, stage: Stage, group: int, width: int, *, training: bool, all_rows: int) -> str:
    """A function that normalises a panel by statistics over its first `rows` rows and applies the group's operations.

    It writes `all_rows` rows.
    """
    layer = stage.groups[group].batch_norm
    assert layer is not None
    operations = stage.groups[group].operations
    dropouts = stage.groups[group].dropouts if training else ()
    parameters = FORWARD_PARAMETERS + "".join(f", ptr %bits{number}" for number in range(len(dropouts)))
    name = f"normalise_{'train' if training else 'validate'}_{stage.index}_{group}_w{width}_r{all_rows}"

    def make(f: Function) -> None:
        pitch = plan.pitch(stage)
        if training or not layer.tracks:
            means, deviations = _batch_statistics(f, layer, pitch, width, update=training)
        else:
            means = [f.vload(f["mean"], c, "mean") for c in row_vectors(f, width)]
            deviations = [_deviation(f, f.vload(f["variance"], c), layer.eps) for c in row_vectors(f, width)]
        scales = [f.vload(f["scale"], c, "scale") for c in row_vectors(f, width)]
        shifts = [f.vload(f["shift"], c, "shift") for c in row_vectors(f, width)]
        stores = training and stage.stores_derivative(group)

        def row(number: Int) -> None:
            for v, c in enumerate(row_vectors(f, width)):
                index = f.add(f.mul(number, pitch), c)
                normal = f.fmul(f.fsub(f.vload(f["values"], index), means[v]), deviations[v], "normal")
                if training:
                    f.store(normal, f["normal"], index)
                value = f.fma(normal, scales[v], shifts[v], "value")
                bits = load_bits(f, [f[f"bits{n}"] for n in range(len(dropouts))], number, c)
                if stores:
                    value, derivative = elementwise.forward_with_derivative(f, value, operations, bits)
                    f.store(derivative, f["derivative"], index)
                else:
                    value = elementwise.forward(f, value, operations, bits)
                f.store(value, f["output"], index)

        f.loop(all_rows, row, index="row")

    return module.function(name, parameters, make)


def _deviation(f: Function, variance: Value, eps: float) -> Value:
    """1 / sqrt(variance + eps)."""
    root = f.intrinsic(f.vector, f"sqrt.v{f.lanes}f32", f.fadd(variance, f.constant(eps)), hint="root")
    return f.fdiv(f.constant(1.0), root, "deviation")


def _batch_statistics(
    f: Function, layer: BatchNorm, pitch: int, width: int, *, update: bool
) -> tuple[list[Value], list[Value]]:
    rows = f.op("float", f"sitofp i64 {f['rows'].text} to float", "rows")
    # Divide: multiplying by the rounded 1 / rows would shift every mean, and so the running mean, in one direction.
    count = f.splat(rows, "count")

    def value(row: Int, c: int) -> Value:
        return f.vload(f["values"], f.add(f.mul(row, pitch), c))

    sums = column_sums(f, f["rows"], width, value)
    means = [f.fdiv(total, count, "mean") for total in sums]

    def squared(row: Int, c: int) -> Value:
        gap = f.fsub(value(row, c), means[c // f.lanes], "gap")
        return f.fmul(gap, gap)

    squares = column_sums(f, f["rows"], width, squared)
    variances = [f.fdiv(total, count, "variance") for total in squares]
    deviations = [_deviation(f, variance, layer.eps) for variance in variances]
    if update:
        for v, c in enumerate(row_vectors(f, width)):
            f.store(deviations[v], f["deviation"], c)
        if layer.tracks:
            fewer = f.fsub(rows, f.scalar(1.0))
            unbiased = f.splat(f.fdiv(rows, fewer), "unbiased")
            new = f.splat(f["factor"], "factor")
            old = f.fsub(f.constant(1.0), new)
            for v, c in enumerate(row_vectors(f, width)):
                for running, now in (("mean", means[v]), ("variance", f.fmul(variances[v], unbiased))):
                    kept = f.fmul(old, f.vload(f[running], c))
                    f.store(f.fma(new, now, kept, running), f[running], c)
    return means, deviations


BACKWARD_PARAMETERS = (
    "ptr %gradient, ptr %normal, ptr %before, ptr %deviation, ptr %scale, ptr %shift, i64 %rows, "
    "ptr %scalars, ptr %hyper"
)


def backward(module: Module, plan: Plan, stage: Stage, group: int, width: int) -> str:
    """A function that takes a panel's gradient through BatchNorm1d, in place, and through the group before it.

    `gradient` is a panel `[batch][width]`, `normal` has the normalised values, `before` the stored derivative of the group
    before, if any. Scale and shift are updated here too; the gradient uses their old values.
    """
    layer = stage.groups[group].batch_norm
    assert layer is not None
    has_before = stage.stores_derivative(group - 1) and not stage.groups[group - 1].tapped
    name = f"normalise_backward_{stage.index}_{group}_w{width}"

    def make(f: Function) -> None:
        pitch = plan.pitch(stage)

        def gradient(row: Int, c: int) -> Value:
            return f.vload(f["gradient"], f.add(f.mul(row, width), c))

        def normal(row: Int, c: int) -> Value:
            return f.vload(f["normal"], f.add(f.mul(row, pitch), c))

        shift_gradients = column_sums(f, f["rows"], width, gradient)
        scale_gradients = column_sums(f, f["rows"], width, lambda r, c: f.fmul(gradient(r, c), normal(r, c)))
        rows = f.op("float", f"sitofp i64 {f['rows'].text} to float", "rows")
        per_row = f.splat(f.fdiv(f.scalar(1.0), rows), "per_row")
        factors = []
        for c in row_vectors(f, width):
            factors.append(f.fmul(f.vload(f["scale"], c), f.vload(f["deviation"], c), "factor"))
        if layer.affine:
            update = Update(f, plan, f["scalars"], f["hyper"])
            for v, c in enumerate(row_vectors(f, width)):
                update.apply(scale_gradients[v], f["scale"], c)
                update.apply(shift_gradients[v], f["shift"], c)
        mean_shift = [f.fmul(total, per_row) for total in shift_gradients]
        mean_scale = [f.fmul(total, per_row) for total in scale_gradients]

        def row(number: Int) -> None:
            for v, c in enumerate(row_vectors(f, width)):
                centred = f.fsub(gradient(number, c), mean_shift[v])
                centred = f.fsub(centred, f.fmul(normal(number, c), mean_scale[v]))
                result = f.fmul(centred, factors[v])
                if has_before:
                    result = f.fmul(result, f.vload(f["before"], f.add(f.mul(number, pitch), c)))
                f.store(result, f["gradient"], f.add(f.mul(number, width), c))

        f.loop(f["rows"], row, index="row")

    return module.function(name, BACKWARD_PARAMETERS, make)
