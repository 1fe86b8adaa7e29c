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


def _forward(f: Function, group: Group, training: bool, stores: bool) -> None:
    operations = Operations(f, group)

    def row(number: Int) -> None:
        start = f.mul(number, f["pitch"])

        def add(_: Int, column: Int, mask: Value, so_far: Value) -> list[Value]:
            return [f.fadd(so_far, f.select(mask, f.vload(f["values"], f.add(start, column)), f.zero))]

        total = f.reduce("add", _over_vectors(f, add, [f.zero])[0])
        mean = f.splat(f.fdiv(total, f["unit_count"]), "mean")

        def gap(column: Int, mask: Value) -> Value:
            return f.select(mask, f.fsub(f.vload(f["values"], f.add(start, column)), mean), f.zero, "gap")

        def square(_: Int, column: Int, mask: Value, so_far: Value) -> list[Value]:
            distance = gap(column, mask)
            return [f.fadd(so_far, f.fmul(distance, distance))]

        squares = f.reduce("add", _over_vectors(f, square, [f.zero])[0])
        variance = f.fadd(f.fdiv(squares, f["unit_count"]), f["eps"])
        deviation = f.fdiv(f.scalar(1.0), f.intrinsic("float", "sqrt.f32", variance, hint="root"), "deviation")
        if training:
            f.store(deviation, f["deviation"], number)
        factor = f.splat(deviation, "deviation")

        def finish(_: Int, column: Int, mask: Value) -> None:
            index = f.add(start, column)
            normal = f.fmul(gap(column, mask), factor, "normal")
            if training:
                f.store(normal, f["normal"], index)
            result = f.fma(normal, f.vload(f["scale"], column), f.vload(f["shift"], column))
            bits: Sequence[Value] = load_bits(f, group, number, column) if training else ()
            operations.store_forward(result, bits, index, stores=stores)

        _over_vectors(f, finish)

    f.loop(f["rows"], row, index="row")


def _backward(f: Function, trains: bool, needed: bool, skips: bool, has_before: bool) -> None:
    stop = f.minimum(f["rows"], f["last"], "stop")

    def gradient(row: Int, vector: Int) -> Value:
        return f.vload(f["gradient"], position_in_panels(f, row, vector), "gradient")

    def normal(row: Int, column: Int) -> Value:
        return f.vload(f["normal"], f.add(f.mul(row, f["pitch"]), column), "normal")

    def parameter_sums(vector: Int, column: Int, _: Value) -> None:
        def add(row: Int, scale: Value, shift: Value) -> list[Value]:
            g = gradient(row, vector)
            return [f.fma(g, normal(row, column), scale), f.fadd(shift, g)]

        sums = f.loop(stop, add, start=f["first"], carry=[f.zero, f.zero], index="row")
        for number, total in enumerate(sums):
            f.store(total, f["sums"], f.add(column, f.mul(number, f["padded"])))

    def row(number: Int) -> None:
        def scaled(vector: Int, column: Int) -> Value:
            return f.fmul(gradient(number, vector), f.vload(f["scale"], column))

        def terms(vector: Int, column: Int, mask: Value, a: Value, b: Value) -> list[Value]:
            g = f.select(mask, scaled(vector, column), f.zero)
            return [f.fadd(a, g), f.fadd(b, f.select(mask, f.fmul(g, normal(number, column)), f.zero))]

        sums = _over_vectors(f, terms, [f.zero, f.zero])
        means = [f.splat(f.fmul(f.reduce("add", total), f["per_unit"])) for total in sums]
        deviation = f.splat(f.load("float", f["deviation"], number, hint="deviation"))

        def finish(vector: Int, column: Int, _: Value) -> None:
            g = f.fsub(f.fsub(scaled(vector, column), means[0]), f.fmul(normal(number, column), means[1]))
            g = f.fmul(g, deviation)
            position = position_in_panels(f, number, vector)
            if skips:
                g = f.fadd(g, f.vload(f["skip"], position, "skip"))
            if has_before:
                g = f.fmul(g, f.vload(f["before"], f.add(f.mul(number, f["pitch"]), column)))
            f.store(g, f["gradient"], position)

        _over_vectors(f, finish)

    if trains:
        _over_vectors(f, parameter_sums)
    if needed:
        f.loop(stop, row, start=f["first"], index="row")
