"""Losses over a range of rows: their sum, the number of correct predictions and, in training, the gradient of the mean.

The gradient is stored in the panels of the last stage, multiplied by the step's `row_weight` (1 / rows of the batch, or
1 / its elements; with weights, 1 / their sum) and by the row's weight. Sums over rows are accumulated in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.plan.plan import HYPERPARAMETERS, SCALARS, Plan
from onelaunch.integers import ceil_div

MAX_INLINE_VECTORS = 4  # a row of at most this many vectors stays in registers; longer rows are looped over
LOSS_PARAMETERS = (
    "ptr %outputs, ptr %targets, ptr %order, ptr %sums, ptr %gradient, i64 %first, i64 %stop, ptr %scalars, ptr %hyper, "
    "ptr %loss, ptr %tally"
)


class LossRows:
    """Emits `loss_rows(...)`: rows [first, stop) of a batch; adds to `*loss` and `*tally`."""

    def __init__(self, f: Function, plan: Plan, *, training: bool) -> None:
        self.f, self.plan, self.training = f, plan, training
        self.classes = plan.last.width
        self.vectors = ceil_div(self.classes, f.lanes)
        self.pitch = plan.pitch(plan.last)
        self.weighted = training and plan.settings.weighted

    def emit(self) -> None:
        f = self.f
        if self.training:
            self.row_weight = f.load("float", f["scalars"], SCALARS.index("row_weight"), hint="row_weight")
        row = self._cross_entropy_row if self.plan.settings.loss == "cross_entropy" else self._elementwise_row
        if self.plan.settings.loss == "cross_entropy":
            self._each_sum(lambda at: f.store(f.constant(1.0), at))
        carry = [Value("double", "0.0"), Value("i64", "0")]
        total, correct = f.loop(f["stop"], row, start=f["first"], carry=carry, index="row")
        if self.plan.settings.loss == "cross_entropy":
            total = self._add_logarithms(total)
        f.store(f.fadd(f.load("double", f["loss"]), total), f["loss"])
        f.store(f.op("i64", f"add i64 {f.load('i64', f['tally']).text}, {correct.text}", "correct"), f["tally"])

    def _target_row(self, row: Int) -> Int:
        if not self.training:
            return row
        number = self.f.load("i32", self.f["order"], row, element="i32", hint="sample")
        return self.f.op("i64", f"zext i32 {number.text} to i64", "sample")

    def _weight(self, row: Int) -> Value:
        """The row's weight in the loss."""
        return self.f.load("float", self.f["weights"], self._target_row(row), hint="weight")

    def _gradient_weight(self, row: Int) -> Value:
        """The row's factor in the gradient of the mean."""
        return self.f.fmul(self.row_weight, self._weight(row), "row_weight") if self.weighted else self.row_weight

    def _gradient_at(self, row: Int) -> Callable[[Int], Value]:
        """A function from v to the address of vector v of a row: panels have two vectors, the last one or two."""
        f, plan = self.f, self.plan
        panels = plan.panels(plan.last)

        def address(v: Int) -> Value:
            if isinstance(v, int):
                first, width = panels[v // 2]
                start = f.at(f["gradient"], first * plan.rows, hint="panel")
                return f.at(start, f.add(f.mul(row, width), v % 2 * f.lanes), hint="gradient")
            # A loop covers wide panels only; a narrow last panel is handled after it.
            panel = f.op("i64", f"lshr i64 {v.text}, 1", "panel")
            half = f.op("i64", f"and i64 {v.text}, 1", "half")
            start = f.at(f["gradient"], f.mul(panel, plan.panel_width * plan.rows), hint="panel")
            inside = f.add(f.mul(row, plan.panel_width), f.mul(half, f.lanes))
            return f.at(start, inside, hint="gradient")

        return address

    def _over_vectors(self, body: Callable[..., list[Value] | None], carry: list[Value]) -> list[Value]:
        """Call `body(v, lanes in use, *carry)` for every vector of a row; only the last may be partly in use."""
        f = self.f
        full = self.classes // f.lanes
        rest = self.classes - full * f.lanes
        looped = 0
        if self.vectors > MAX_INLINE_VECTORS:
            looped = full // 2 * 2
            carry = f.loop(looped, lambda v, *c: body(v, f.lanes, *c), carry=carry, index="vector")
        for v in range(looped, full):
            carry = list(body(v, f.lanes, *carry) or ())
        if rest:
            carry = list(body(full, rest, *carry) or ())
        return carry

    def _only(self, value: Value, lanes: int, other: Value) -> Value:
        f = self.f
        return value if lanes == f.lanes else f.select(f.lanes_below(lanes), value, other)

    def _each_sum(self, body: Callable[[Value], None]) -> None:
        f = self.f
        f.loop(
            f["stop"], lambda row: body(f.at(f["sums"], row, hint="sums")), start=f["first"], step=f.lanes, index="sum"
        )

    def _add_logarithms(self, total: Value) -> Value:
        """Add the logarithms of the rows' sums, one vector at a time; lanes after the last row hold 1."""
        f = self.f

        def add(row: Int, so_far: Value) -> list[Value]:
            logarithm = vector_math.log(f, f.vload(f["sums"], row, "sums"))
            if self.weighted:  # lanes after the last row hold old weights, times the logarithm of 1
                logarithm = f.fmul(logarithm, f.vload(f["row_weights"], row, "weights"))
            return [self._add_scalar(so_far, f.reduce("add", logarithm))]

        return f.loop(f["stop"], add, start=f["first"], step=f.lanes, carry=[total], index="sum")[0]

    def _add_scalar(self, total: Value, term: Value) -> Value:
        return self.f.fadd(total, self.f.op("double", f"fpext float {term.text} to double", "term"), "total")

    def _cross_entropy_row(self, row: Int, total: Value, correct: Value) -> list[Value]:
        f = self.f
        logits = f.at(f["outputs"], f.mul(row, self.pitch), hint="logits")
        label = f.load("i64", f["targets"], self._target_row(row), element="i64", hint="label")
        lowest = f.constant(-math.inf)

        def larger(v: Int, lanes: int, largest: Value) -> list[Value]:
            z = f.vload(logits, f.mul(v, f.lanes), "z")
            return [f.at_least(self._only(z, lanes, lowest), largest)]

        peak = f.reduce("max", self._over_vectors(larger, [lowest])[0], "peak")
        peaks = f.splat(peak, "peak")
        gradient_at = self._gradient_at(row)
        kept: dict[int, Value] = {}

        def exponential(v: Int, lanes: int, so_far: Value) -> list[Value]:
            z = f.vload(logits, f.mul(v, f.lanes), "z")
            e = self._only(vector_math.exp_nonpositive(f, f.fsub(z, peaks)), lanes, f.zero)
            if self.training and isinstance(v, int):
                kept[v] = e
            elif self.training:
                f.store(e, gradient_at(v))
            return [f.fadd(so_far, e)]

        total_of_row = f.reduce("add", self._over_vectors(exponential, [f.zero])[0], "sum")
        f.store(total_of_row, f["sums"], row)
        if self.training:
            self._cross_entropy_gradient(row, label, total_of_row, gradient_at, kept)
        chosen = f.load("float", logits, label, hint="chosen")
        term = self._cross_entropy_term(logits, peak, chosen)
        if self.weighted:
            weight = self._weight(row)
            f.store(weight, f["row_weights"], row)
            term = f.fmul(term, weight, "term")
        is_correct = f.compare("eq", self._first_peak(logits, peaks), label, "correct")
        more = f.op("i64", f"zext i1 {is_correct.text} to i64", "correct")
        return [self._add_scalar(total, term), f.op("i64", f"add i64 {correct.text}, {more.text}", "correct")]

    def _label_smoothing(self) -> Value:
        return self.f.load("float", self.f["hyper"], HYPERPARAMETERS.index("label_smoothing"), hint="label_smoothing")

    def _cross_entropy_term(self, logits: Value, peak: Value, chosen: Value) -> Value:
        """The row's loss without the logarithm of its sum: peak - chosen, mixed with the mean logit if smoothed."""
        f = self.f
        if not self.plan.settings.label_smoothing:
            return f.fsub(peak, chosen, "term")

        def add(v: Int, lanes: int, so_far: Value) -> list[Value]:
            gap = f.fsub(f.splat(peak), f.vload(logits, f.mul(v, f.lanes)))
            return [f.fadd(so_far, self._only(gap, lanes, f.zero))]

        gaps = f.reduce("add", self._over_vectors(add, [f.zero])[0], "gaps")
        mean = f.fmul(gaps, f.scalar(1 / self.classes), "mean")
        label_smoothing = self._label_smoothing()
        certain = f.fsub(f.scalar(1.0), label_smoothing)
        return f.fma(label_smoothing, mean, f.fmul(certain, f.fsub(peak, chosen)), "term")

    def _cross_entropy_gradient(
        self, row: Int, label: Value, total: Value, gradient_at: Callable[[Int], Value], kept: dict[int, Value]
    ) -> None:
        """(softmax - target) * row_weight."""
        f = self.f
        row_weight = self._gradient_weight(row)
        scale = f.splat(f.fdiv(row_weight, total, "scale"))
        off: Value | None = None
        target_weight = row_weight
        if self.plan.settings.label_smoothing:
            # From one product, so that a network of one class has a gradient of exactly zero, as in PyTorch.
            smoothed = f.fmul(row_weight, self._label_smoothing(), "smoothed")
            target_weight = f.fsub(row_weight, smoothed)
            off = f.splat(f.fmul(smoothed, f.scalar(-1 / self.classes)), "off")

        def scaled(v: Int, lanes: int) -> None:
            e = kept[v] if isinstance(v, int) else f.vload(gradient_at(v))
            f.store(f.fma(e, scale, off) if off else f.fmul(e, scale), gradient_at(v))

        self._over_vectors(scaled, [])
        at = self._element_address(row, label)
        f.store(f.fsub(f.load("float", at), target_weight), at)

    def _element_address(self, row: Int, column: Value) -> Value:
        """The address of one unit's gradient, whose panel is computed at run time."""
        f, plan = self.f, self.plan
        panels = plan.panels(plan.last)
        width = panels[0].width
        shift = int(math.log2(plan.panel_width))
        if len(panels) == 1:
            return f.at(f["gradient"], f.add(f.mul(row, width), column), hint="element")
        panel = f.op("i64", f"lshr i64 {column.text}, {shift}", "panel")
        inside = f.op("i64", f"and i64 {column.text}, {plan.panel_width - 1}", "inside")
        stride: Int = plan.panel_width
        if panels[-1].width != plan.panel_width:
            in_last = f.compare("uge", column, f.i64(panels[-1].first), "in_last")
            stride = f.select(in_last, f.i64(panels[-1].width), f.i64(plan.panel_width), "stride")
        start = f.mul(panel, plan.panel_width * plan.rows)
        return f.at(f["gradient"], f.add(start, f.add(f.mul(stride, row), inside)), hint="element")

    def _first_peak(self, logits: Value, peaks: Value) -> Value:
        """The first class whose logit is the maximum."""
        f = self.f
        none = Value("i64", str(self.classes))
        small = f"i{f.lanes}"

        def earlier(v: Int, lanes: int, found: Value) -> list[Value]:
            z = f.vload(logits, f.mul(v, f.lanes), "z")
            equal = f.compare("oeq", self._only(z, lanes, f.constant(math.nan)), peaks, "equal")
            mask = f.op(small, f"bitcast {equal.type} {equal.text} to {small}", "mask")
            wide = f.op("i64", f"zext {small} {mask.text} to i64", "mask")
            lane = f.intrinsic("i64", "cttz.i64", wide, Value("i1", "false"), hint="lane")
            number = f.i64(f.add(lane, f.mul(v, f.lanes)))
            candidate = f.select(f.compare("eq", wide, Value("i64", "0")), none, number)
            return [f.intrinsic("i64", "umin.i64", found, candidate, hint="found")]

        return self._over_vectors(earlier, [none])[0]

    def _elementwise_row(self, row: Int, total: Value, correct: Value) -> list[Value]:
        """Mean squared error or binary cross-entropy."""
        f = self.f
        bce = self.plan.settings.loss == "bce_with_logits"
        outputs = f.at(f["outputs"], f.mul(row, self.pitch), hint="outputs")
        targets = f.at(f["targets"], f.mul(self._target_row(row), self.classes), hint="targets")
        gradient_at = self._gradient_at(row)
        weight = f.splat(self._gradient_weight(row)) if self.training else f.zero

        def element(v: Int, lanes: int, so_far: Value, correct: Value) -> list[Value]:
            z = f.vload(outputs, f.mul(v, f.lanes), "z")
            target = f.vload_first(f.at(targets, f.mul(v, f.lanes)), lanes, hint="target")
            if bce:
                term, gradient = _binary_cross_entropy(f, z, target)
                correct = self._count_sides(z, target, lanes, correct)
            else:
                gap = f.fsub(z, target, "gap")
                term, gradient = f.fmul(gap, gap), f.fadd(gap, gap)
            if self.training:
                f.store(f.fmul(gradient, weight), gradient_at(v))
            return [f.fadd(so_far, self._only(term, lanes, f.zero)), correct]

        terms, correct = self._over_vectors(element, [f.zero, correct])
        sum_of_row = f.reduce("add", terms)
        if self.weighted:
            sum_of_row = f.fmul(sum_of_row, self._weight(row))
        return [self._add_scalar(total, sum_of_row), correct]

    def _count_sides(self, z: Value, target: Value, lanes: int, correct: Value) -> Value:
        f = self.f
        differ = f.binary("xor", f.compare("ogt", target, f.constant(0.5)), f.compare("ogt", z, f.zero))
        small = f"i{f.lanes}"
        mask = f.op(small, f"bitcast {differ.type} {differ.text} to {small}", "mask")
        wide = f.op("i64", f"zext {small} {mask.text} to i64", "mask")
        wrong = f.op("i64", f"and i64 {wide.text}, {2**lanes - 1}", "wrong")
        count = f.intrinsic("i64", "ctpop.i64", wrong, hint="wrong")
        same = f.op("i64", f"sub i64 {lanes}, {count.text}", "same")
        return f.op("i64", f"add i64 {correct.text}, {same.text}", "correct")


def _binary_cross_entropy(f: Function, z: Value, target: Value) -> tuple[Value, Value]:
    """max(z, 0) - z * target + log(1 + exp(-|z|)) and sigmoid(z) - target."""
    magnitude = f.intrinsic(f.vector, f"fabs.v{f.lanes}f32", z, hint="magnitude")
    small = vector_math.exp_nonpositive(f, f.op(f.vector, f"fneg {f.vector} {magnitude.text}", "negated"))
    above = f.at_least(z, f.zero)
    negated = f.op(f.vector, f"fneg {f.vector} {z.text}", "negated")
    term = f.fadd(f.fma(negated, target, above), vector_math.log1p_unit(f, small), "term")
    return term, f.fsub(vector_math.sigmoid_from_decay(f, z, small), target)


def loss_rows(module: Module, plan: Plan, *, training: bool) -> str:
    name = f"{plan.settings.loss}_{'train' if training else 'validate'}"
    parameters = LOSS_PARAMETERS + ", ptr %weights, ptr %row_weights" * (training and plan.settings.weighted)
    return module.function(name, parameters, lambda f: LossRows(f, plan, training=training).emit())
