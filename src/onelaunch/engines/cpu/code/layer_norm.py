"""LayerNorm over whole rows. A partition computes whole rows of such a stage, forward and backward, so a row's sums need no
exchange; the gradients of scale and shift are summed over partitions in the next phase, by the owners of the columns.

The forward computes the mean, then the variance of the centred values, as PyTorch does. It keeps the normalised values and,
per row, `deviation` = 1 / sqrt(variance + eps); the backward needs no more. Without parameters, scale is 1 and shift 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code.apply import bits_fields, load_bits
from onelaunch.engines.cpu.code.elementwise import Group, Operations
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gradient import position_in_panels
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel

ROWS_TOGETHER = 4
# Computes the sums of some rows and stores them in memory, from slot number `slot` on: `statistics(rows, slot)`.
Statistics = Callable[[Sequence[Int], Int], None]


def forward_kernel(group: Group) -> Kernel:
    """A row has `units` values in `vectors` vectors; `unit_count` is their number as a float."""
    operations = f", {group.fields}" if group.names else ""
    return Kernel(
        "layer_norm",
        "ptr values, ptr normal, ptr output, ptr derivative, i64 rows, i64 pitch, i64 units, i64 vectors, "
        f"float unit_count, float eps, ptr scale, ptr shift, ptr deviation{operations}{bits_fields(group)}",
    )


# Rows [first, last) of a gradient in panels, as far as the batch has them. `before` has the stored derivative of the group
# before, `skip` the gradient that reaches its output through additions. The sums over these rows for scale and, `padded`
# floats later, for shift are written to `sums`.
BACKWARD = Kernel(
    "layer_norm_backward",
    "ptr gradient, ptr skip, ptr normal, ptr before, ptr deviation, ptr scale, ptr sums, i64 first, i64 last, i64 units, "
    "i64 vectors, i64 pitch, i64 padded, i64 all_rows, float per_unit",
    "rows",
)


def emit_forward(module: Module, group: Group, training: bool, stores: bool) -> None:
    module.kernel(forward_kernel(group), lambda f: _forward(f, group, training, stores))


def emit_backward(module: Module, trains: bool, needed: bool, skips: bool, has_before: bool) -> None:
    """`trains`: there is a scale or a shift. `needed`: the gradient of the input is used."""
    module.kernel(BACKWARD, lambda f: _backward(f, trains, needed, skips, has_before))


def _over_vectors(f: Function, body: Callable[..., Sequence[Value] | None], carry: Sequence[Value] = ()) -> list[Value]:
    """Call `body(number, column, mask of the lanes that are units, *carry)` for every vector of a row."""

    def one(number: Int, *values: Value) -> list[Value]:
        column = f.mul(number, f.lanes)
        return list(body(number, column, f.lanes_below(f.sub(f["units"], column)), *values) or ())

    return f.loop(f["vectors"], one, carry=carry, index="vector")


def _over_rows(f: Function, first: Int, last: Int, statistics: Statistics, finish: Callable[[Int, Int], None]) -> None:
    """For each row in [first, last): its sums, then `finish(row, slot)`. The sums of ROWS_TOGETHER rows are computed side by
    side, as each is a long chain of dependent instructions: 64 rows of 64 units took 3.0 µs forward one by one."""

    def rows_from(start: Int) -> None:
        count = f.minimum(f.sub(last, start), ROWS_TOGETHER, "count")

        def one_by_one() -> None:
            f.loop(count, lambda n: statistics([f.add(start, n)], n), index="row")

        f.either(
            f.compare("eq", count, f.i64(ROWS_TOGETHER), "all"),
            lambda: statistics([f.add(start, n) for n in range(ROWS_TOGETHER)], 0),
            one_by_one,
        )
        f.loop(count, lambda n: finish(f.add(start, n), n), index="row")

    f.loop(last, rows_from, start=first, step=ROWS_TOGETHER, index="rows")


def _forward(f: Function, group: Group, training: bool, stores: bool) -> None:
    operations = Operations(f, group)
    means, deviations = (
        f.op("ptr", f"alloca [{ROWS_TOGETHER} x float], align 16", name) for name in ("means", "deviations")
    )

    def gap(start: Int, column: Int, mask: Value, mean: Value) -> Value:
        return f.select(mask, f.fsub(f.vload(f["values"], f.add(start, column)), mean), f.zero, "gap")

    def statistics(rows: Sequence[Int], slot: Int) -> None:
        starts, zeros = [f.mul(row, f["pitch"]) for row in rows], [f.zero] * len(rows)

        def add(_: Int, column: Int, mask: Value, *so_far: Value) -> list[Value]:
            values = [f.select(mask, f.vload(f["values"], f.add(start, column)), f.zero) for start in starts]
            return [f.fadd(total, value) for total, value in zip(so_far, values, strict=True)]

        totals = [f.reduce("add", total) for total in _over_vectors(f, add, zeros)]
        of_rows = [f.fdiv(total, f["unit_count"]) for total in totals]
        splats = [f.splat(mean, "mean") for mean in of_rows]

        def square(_: Int, column: Int, mask: Value, *so_far: Value) -> list[Value]:
            gaps = [gap(start, column, mask, mean) for start, mean in zip(starts, splats, strict=True)]
            return [f.fadd(total, f.fmul(each, each)) for total, each in zip(so_far, gaps, strict=True)]

        squares = [f.reduce("add", total) for total in _over_vectors(f, square, zeros)]
        for n, (row, mean, total) in enumerate(zip(rows, of_rows, squares, strict=True)):
            variance = f.fadd(f.fdiv(total, f["unit_count"]), f["eps"])
            deviation = f.fdiv(f.scalar(1.0), f.intrinsic("float", "sqrt.f32", variance, hint="root"), "deviation")
            if training:
                f.store(deviation, f["deviation"], row)
            f.store(mean, means, f.add(slot, n))
            f.store(deviation, deviations, f.add(slot, n))

    def finish(row: Int, slot: Int) -> None:
        start = f.mul(row, f["pitch"])
        mean, factor = (f.splat(f.load("float", pointer, slot)) for pointer in (means, deviations))

        def one(_: Int, column: Int, mask: Value) -> None:
            index = f.add(start, column)
            normal = f.fmul(gap(start, column, mask, mean), factor, "normal")
            if training:
                f.store(normal, f["normal"], index)
            result = f.fma(normal, f.vload(f["scale"], column), f.vload(f["shift"], column))
            bits: Sequence[Value] = load_bits(f, group, row, column) if training else ()
            operations.store_forward(result, bits, index, stores=stores)

        _over_vectors(f, one)

    _over_rows(f, 0, f["rows"], statistics, finish)


def _backward(f: Function, trains: bool, needed: bool, skips: bool, has_before: bool) -> None:
    stop = f.minimum(f["rows"], f["last"], "stop")
    means = f.op("ptr", f"alloca [{2 * ROWS_TOGETHER} x float], align 16", "means")

    def gradient(row: Int, vector: Int) -> Value:
        return f.vload(f["gradient"], position_in_panels(f, row, vector), "gradient")

    def normal(row: Int, column: Int) -> Value:
        return f.vload(f["normal"], f.add(f.mul(row, f["pitch"]), column), "normal")

    def scaled(row: Int, vector: Int, column: Int) -> Value:
        return f.fmul(gradient(row, vector), f.vload(f["scale"], column))

    def parameter_sums(vector: Int, column: Int, _: Value) -> None:
        def add(row: Int, scale: Value, shift: Value) -> list[Value]:
            g = gradient(row, vector)
            return [f.fma(g, normal(row, column), scale), f.fadd(shift, g)]

        sums = f.loop(stop, add, start=f["first"], carry=[f.zero, f.zero], index="row")
        for number, total in enumerate(sums):
            f.store(total, f["sums"], f.add(column, f.mul(number, f["padded"])))

    def statistics(rows: Sequence[Int], slot: Int) -> None:
        """Per row, the means of the scaled gradient and of its product with the normalised values."""

        def terms(vector: Int, column: Int, mask: Value, *so_far: Value) -> list[Value]:
            found = []
            for row, a, b in zip(rows, so_far[::2], so_far[1::2], strict=True):
                g = f.select(mask, scaled(row, vector, column), f.zero)
                found += [f.fadd(a, g), f.fadd(b, f.select(mask, f.fmul(g, normal(row, column)), f.zero))]
            return found

        sums = _over_vectors(f, terms, [f.zero] * (2 * len(rows)))
        for n, total in enumerate(sums):
            f.store(f.fmul(f.reduce("add", total), f["per_unit"]), means, f.add(f.mul(slot, 2), n))

    def finish(row: Int, slot: Int) -> None:
        place = f.mul(slot, 2)
        mean, product_mean = (f.splat(f.load("float", means, f.add(place, n))) for n in range(2))
        deviation = f.splat(f.load("float", f["deviation"], row, hint="deviation"))

        def one(vector: Int, column: Int, _: Value) -> None:
            g = f.fsub(f.fsub(scaled(row, vector, column), mean), f.fmul(normal(row, column), product_mean))
            g = f.fmul(g, deviation)
            position = position_in_panels(f, row, vector)
            if skips:
                g = f.fadd(g, f.vload(f["skip"], position, "skip"))
            if has_before:
                g = f.fmul(g, f.vload(f["before"], f.add(f.mul(row, f["pitch"]), column)))
            f.store(g, f["gradient"], position)

        _over_vectors(f, one)

    if trains:
        _over_vectors(f, parameter_sums)
    if needed:
        _over_rows(f, f["first"], stop, statistics, finish)
