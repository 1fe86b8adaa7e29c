"""LayerNorm over whole rows. A partition computes whole rows of such a stage, forward and backward, so a row's sums need no
exchange; the gradients of scale and shift are summed over partitions in the next phase, by the owners of the columns.

The forward computes the mean, then the variance of the centred values, as PyTorch does. It keeps the normalised values and,
per row, `deviation` = 1 / sqrt(variance + eps); the backward needs no more. Rows of up to MAX_UNROLLED vectors stay in
registers between the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onelaunch.engines.cpu.code import elementwise
from onelaunch.engines.cpu.code.batch_norm import load_bits
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.optimizer import Update
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.stages import Stage

MAX_UNROLLED = 8  # vectors per row


class Vector:
    """One vector of a row: its column, its place in a gradient in panels, and how many of its lanes are units."""

    def __init__(self, f: Function, plan: Plan, first: Int, half: int, width: int, lanes: int) -> None:
        self.f, self.plan, self.first, self.half, self.width, self.lanes = f, plan, first, half, width, lanes
        self.column = f.add(first, half)

    def in_panels(self, row: Int) -> Int:
        f = self.f
        return f.add(f.add(f.mul(self.first, self.plan.rows), f.mul(row, self.width)), self.half)

    def only(self, value: Value) -> Value:
        """`value` with zero in the lanes past the last unit."""
        if self.lanes == self.f.lanes:
            return value
        return self.f.select(self.f.lanes_below(self.lanes), value, self.f.zero)


def over_vectors(
    f: Function, plan: Plan, stage: Stage, body: Callable[..., Sequence[Value] | None], carry: Sequence[Value] = ()
) -> list[Value]:
    """Call `body(vector, *carry)` for every vector of a row; a run-time loop over whole panels if there are many."""
    panels = plan.panels(stage)
    wide = plan.padded(stage) > MAX_UNROLLED * f.lanes
    whole = sum(panel.width == plan.panel_width and panel.first + panel.width <= stage.width for panel in panels)
    looped = whole if wide else 0

    def panel(first: Int, width: int, lanes: int, values: Sequence[Value]) -> list[Value]:
        for half in range(0, width, f.lanes):
            vector = Vector(f, plan, first, half, width, min(f.lanes, lanes - half))
            values = list(body(vector, *values) or ())
        return list(values)

    width = plan.panel_width
    values = f.loop(
        looped, lambda number, *inner: panel(f.mul(number, width), width, width, inner), carry=carry, index="panel"
    )
    for rest in panels[looped:]:
        values = panel(rest.first, rest.width, stage.width - rest.first, values)
    return values


def _sum(f: Function, plan: Plan, stage: Stage, terms: Callable[[Vector], Sequence[Value]], count: int) -> list[Value]:
    """The sums over a row's units of `count` terms, each in all lanes."""

    def add(vector: Vector, *so_far: Value) -> list[Value]:
        return [f.fadd(a, vector.only(b)) for a, b in zip(so_far, terms(vector), strict=True)]

    sums = over_vectors(f, plan, stage, add, [f.zero] * count)
    return [f.reduce("add", total) for total in sums]


class _Once:
    """Remembers a vector's values between two passes over a row whose vectors are unrolled."""

    def __init__(self, compute: Callable[[Vector], tuple[Value, ...]]) -> None:
        self.compute = compute
        self.kept: dict[int, tuple[Value, ...]] = {}

    def __call__(self, vector: Vector) -> tuple[Value, ...]:
        if not isinstance(vector.column, int):
            return self.compute(vector)
        if vector.column not in self.kept:
            self.kept[vector.column] = self.compute(vector)
        return self.kept[vector.column]


FORWARD_PARAMETERS = (
    "ptr %values, ptr %normal, ptr %output, ptr %derivative, i64 %bits_pitch, ptr %scale, ptr %shift, ptr %deviation, "
    "i64 %rows"
)


def forward(module: Module, plan: Plan, stage: Stage, group: int, *, training: bool) -> str:
    """A function that normalises `rows` rows and applies the group's operations."""
    layer = stage.groups[group].layer_norm
    assert layer is not None
    operations = stage.groups[group].operations
    dropouts = stage.groups[group].dropouts if training else ()
    parameters = FORWARD_PARAMETERS + "".join(f", ptr %bits{number}" for number in range(len(dropouts)))
    pitch = plan.pitch(stage)

    def make(f: Function) -> None:
        count = f.scalar(float(stage.width))

        def row(number: Int) -> None:
            start = f.mul(number, pitch)
            value = _Once(lambda vector: (f.vload(f["values"], f.add(start, vector.column)),))
            (total,) = _sum(f, plan, stage, value, 1)
            mean = f.splat(f.fdiv(total, count), "mean")
            gap = _Once(lambda vector: (vector.only(f.fsub(value(vector)[0], mean, "gap")),))

            def square(vector: Vector) -> tuple[Value]:
                (distance,) = gap(vector)
                return (f.fmul(distance, distance),)

            (squares,) = _sum(f, plan, stage, square, 1)
            root = f.intrinsic("float", "sqrt.f32", f.fadd(f.fdiv(squares, count), f.scalar(layer.eps)), hint="root")
            deviation = f.fdiv(f.scalar(1.0), root, "deviation")
            if training:
                f.store(deviation, f["deviation"], number)
            scale = f.splat(deviation, "deviation")

            def finish(vector: Vector) -> None:
                index = f.add(start, vector.column)
                normal = f.fmul(gap(vector)[0], scale, "normal")
                if training:
                    f.store(normal, f["normal"], index)
                result = normal
                if layer.scale:
                    result = f.fmul(normal, f.vload(f["scale"], vector.column))
                if layer.shift:
                    shift = f.vload(f["shift"], vector.column)
                    weight = f.vload(f["scale"], vector.column)
                    result = f.fma(normal, weight, shift) if layer.scale else f.fadd(normal, shift)
                bits = load_bits(f, [f[f"bits{n}"] for n in range(len(dropouts))], number, vector.column)
                if training and stage.stores_derivative(group):
                    result, derivative = elementwise.forward_with_derivative(f, result, operations, bits)
                    f.store(derivative, f["derivative"], index)
                else:
                    result = elementwise.forward(f, result, operations, bits)
                f.store(result, f["output"], index)

            over_vectors(f, plan, stage, finish)

        f.loop(f["rows"], row, index="row")

    return module.function(f"layer_norm_{'train' if training else 'validate'}_{stage.index}_{group}", parameters, make)


BACKWARD_PARAMETERS = (
    "ptr %gradient, ptr %skip, ptr %normal, ptr %before, ptr %deviation, ptr %scale, ptr %sums, i64 %first, i64 %stop"
)


def backward(module: Module, plan: Plan, stage: Stage, group: int) -> str:
    """A function that takes rows `first` to `stop` of a gradient in panels through a LayerNorm and the group before it.

    `before` has the stored derivative of the group before, `skip` the gradient that reaches its output through additions.
    The sums over these rows for scale and shift are written to `sums`.
    """
    layer = stage.groups[group].layer_norm
    assert layer is not None
    pitch, before = plan.pitch(stage), stage.groups[group - 1]
    needed = stage.needs_gradient(group - 1)

    def make(f: Function) -> None:
        def gradient(row: Int, vector: Vector) -> Value:
            return f.vload(f["gradient"], vector.in_panels(row), "gradient")

        def normal(row: Int, vector: Vector) -> Value:
            return f.vload(f["normal"], f.add(f.mul(row, pitch), vector.column), "normal")

        def parameter_sums(vector: Vector) -> None:
            def add(row: Int, scale: Value, shift: Value) -> list[Value]:
                g = gradient(row, vector)
                return [f.fma(g, normal(row, vector), scale), f.fadd(shift, g)]

            sums = f.loop(f["stop"], add, start=f["first"], carry=[f.zero, f.zero], index="row")
            for number, total in enumerate(sums):
                f.store(total, f["sums"], f.add(vector.column, number * plan.padded(stage)))

        if layer.scale or layer.shift:
            over_vectors(f, plan, stage, parameter_sums)
        if not needed:
            return
        per_unit = f.scalar(1 / stage.width)

        def row(number: Int) -> None:
            def scaled(vector: Vector) -> tuple[Value, Value]:
                g = gradient(number, vector)
                if layer.scale:
                    g = f.fmul(g, f.vload(f["scale"], vector.column))
                return g, normal(number, vector)

            known = _Once(scaled)

            def terms(vector: Vector) -> tuple[Value, Value]:
                g, x = known(vector)
                return g, f.fmul(g, x)

            means = [f.splat(f.fmul(total, per_unit)) for total in _sum(f, plan, stage, terms, 2)]
            deviation = f.splat(f.load("float", f["deviation"], number, hint="deviation"))

            def finish(vector: Vector) -> None:
                g, x = known(vector)
                g = f.fsub(f.fsub(g, means[0]), f.fmul(x, means[1]))
                g = f.fmul(g, deviation)
                if before.tapped:
                    g = f.fadd(g, f.vload(f["skip"], vector.in_panels(number), "skip"))
                if stage.stores_derivative(group - 1):
                    g = f.fmul(g, f.vload(f["before"], f.add(f.mul(number, pitch), vector.column)))
                f.store(g, f["gradient"], vector.in_panels(number))

            over_vectors(f, plan, stage, finish)

        f.loop(f["stop"], row, start=f["first"], index="row")

    return module.function(f"layer_norm_backward_{stage.index}_{group}", BACKWARD_PARAMETERS, make)


def update(module: Module, plan: Plan, stage: Stage, group: int, width: int, sources: int) -> str:
    """`(sums0, ..., scale, shift, scalars, hyper)`: add the partitions' sums of a panel and update scale and shift."""
    layer = stage.groups[group].layer_norm
    assert layer is not None
    parameters = "".join(f"ptr %sums{number}, " for number in range(sources))

    def make(f: Function) -> None:
        step = Update(f, plan, f["scalars"], f["hyper"])
        for c in range(0, width, f.lanes):
            for number, (name, exists) in enumerate((("scale", layer.scale), ("shift", layer.shift))):
                if exists:
                    place = c + number * plan.padded(stage)
                    total = f.vload(f["sums0"], place)
                    for source in range(1, sources):
                        total = f.fadd(total, f.vload(f[f"sums{source}"], place))
                    step.apply(total, f[name], c)

    return module.function(
        f"layer_norm_update_{stage.index}_{group}_w{width}_{sources}",
        parameters + "ptr %scale, ptr %shift, ptr %scalars, ptr %hyper", make,
    )  # fmt: skip
