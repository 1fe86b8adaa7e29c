"""Losses over a range of rows: their sum, the number of correct predictions and, in training, the gradient of the mean.

The gradient is stored in the panels of the last stage, multiplied by the step's `row_weight` (1 / rows of the batch, or
1 / its elements; with weights, 1 / their sum) and by the row's weight. Sums over rows are accumulated in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gradient import position_in_panels
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.plan.settings import HYPERPARAMETERS, SCALARS

# Rows [first, last) of the batch. `loss` and `tally` are added to; in training, `loss` has one entry per step of the call.
LOSS_FIELDS = (
    "ptr outputs, i64 pitch, ptr targets, i64 first, i64 last, i64 classes, float inverse_classes, ptr gradient, ptr hyper, "
    "ptr loss, ptr tally, ptr weights"
)
LOSS_STEP = "j first_row rows order scalars"
# `sums` and `row_weights` have room for one float per row. `vectors` is the width of the last stage, `all_rows` the height
# of its panels.
LOSS = Kernel("loss", f"{LOSS_FIELDS}, ptr sums, ptr row_weights, i64 vectors, i64 all_rows", LOSS_STEP)


def emit(module: Module, loss: str, training: bool, smooths: bool, weighted: bool) -> None:
    """`weighted`: rows have weights in the loss."""
    module.kernel(LOSS, lambda f: _Loss(f, loss, training, smooths, weighted).emit())


def loss_address(f: Function, training: bool) -> Value:
    return f.at(f["loss"], f["j"], "double", "loss") if training else f["loss"]


def row_weight(f: Function) -> Value:
    return f.splat(f.load("float", f["scalars"], SCALARS.index("row_weight"), hint="row_weight"), "row_weight")


def smoothing(f: Function) -> Value:
    column = HYPERPARAMETERS.index("label_smoothing")
    return f.splat(f.load("float", f["hyper"], column, hint="label_smoothing"), "label_smoothing")


class _Loss:
    def __init__(self, f: Function, loss: str, training: bool, smooths: bool, weighted: bool) -> None:
        self.f, self.loss, self.training, self.smooths, self.weighted = f, loss, training, smooths, weighted

    def emit(self) -> None:
        f = self.f
        if self.training:
            self.row_weight = row_weight(f)
        if self.smooths:
            self.smoothing = smoothing(f)
        stop = f.minimum(f["rows"], f["last"], "stop")
        cross_entropy = self.loss == "cross_entropy"
        if cross_entropy:
            self._each_sum(stop, lambda at: f.store(f.constant(1.0), at))
        row = self._cross_entropy_row if cross_entropy else self._elementwise_row
        carry = [Value("double", "0.0"), Value("i64", "0")]
        total, correct = f.loop(stop, row, start=f["first"], carry=carry, index="row")
        if cross_entropy:
            total = self._add_logarithms(stop, total)
        address = loss_address(f, self.training)
        f.store(total if self.training else f.fadd(f.load("double", address), total), address)
        f.store(f.i64(f.add(f.load("i64", f["tally"]), correct, "correct")), f["tally"])
        if self.training:
            missing = f.intrinsic("i64", "smax.i64", stop, f["first"], hint="missing")
            f.loop(f["last"], self._clear_row, start=missing, index="row")

    def _clear_row(self, row: Int) -> None:
        """Set the gradient of a row past the end of a smaller last batch to zero."""
        at = self._gradient_at(row)
        self.f.loop(self.f["vectors"], lambda v: self.f.store(self.f.zero, at(v)), index="vector")

    def _sample(self, row: Int) -> Int:
        """The row's number in the data set."""
        if not self.training:
            return self.f.add(self.f["first_row"], row)
        number = self.f.load("i32", self.f["order"], row, element="i32", hint="sample")
        return self.f.op("i64", f"zext i32 {number.text} to i64", "sample")

    def _weight(self, row: Int) -> Value:
        """The row's weight in the loss."""
        return self.f.load("float", self.f["weights"], self._sample(row), hint="weight")

    def _gradient_weight(self, row: Int) -> Value:
        """The row's factor in the gradient of the mean."""
        return self.f.fmul(self.row_weight, self.f.splat(self._weight(row))) if self.weighted else self.row_weight

    def _gradient_at(self, row: Int) -> Callable[[Int], Value]:
        """A function from v to the address of vector v of a row."""
        return lambda v: self.f.at(self.f["gradient"], position_in_panels(self.f, row, v), hint="gradient")

    def _over_vectors(self, body: Callable[..., list[Value] | None], carry: list[Value]) -> list[Value]:
        """Call `body(v, mask of the lanes in use, *carry)` for every vector of a row."""
        f = self.f

        def one(v: Int, *values: Value) -> list[Value]:
            return list(body(v, f.lanes_below(f.sub(f["classes"], f.mul(v, f.lanes))), *values) or ())

        return f.loop(f["vectors"], one, carry=carry, index="vector")

    def _each_sum(self, stop: Value, body: Callable[[Value], None]) -> None:
        f = self.f
        f.loop(stop, lambda row: body(f.at(f["sums"], row, hint="sums")), start=f["first"], step=f.lanes, index="sum")

    def _add_logarithms(self, stop: Value, total: Value) -> Value:
        """Add the logarithms of the rows' sums, one vector at a time; lanes after the last row hold 1."""
        f = self.f

        def add(row: Int, so_far: Value) -> list[Value]:
            logarithm = vector_math.log(f, f.vload(f["sums"], row, "sums"))
            if self.weighted:  # lanes after the last row hold old weights, times the logarithm of 1
                logarithm = f.fmul(logarithm, f.vload(f["row_weights"], row, "weights"))
            return [self._add_scalar(so_far, f.reduce("add", logarithm))]

        return f.loop(stop, add, start=f["first"], step=f.lanes, carry=[total], index="sum")[0]

    def _add_scalar(self, total: Value, term: Value) -> Value:
        return self.f.fadd(total, self.f.op("double", f"fpext float {term.text} to double", "term"), "total")

    def _cross_entropy_row(self, row: Int, total: Value, correct: Value) -> list[Value]:
        f = self.f
        logits = f.at(f["outputs"], f.mul(row, f["pitch"]), hint="logits")
        label = f.load("i64", f["targets"], self._sample(row), element="i64", hint="label")
        lowest = f.constant(-math.inf)

        def larger(v: Int, mask: Value, largest: Value) -> list[Value]:
            z = f.vload(logits, f.mul(v, f.lanes), "z")
            return [f.at_least(f.select(mask, z, lowest), largest)]

        peak = f.reduce("max", self._over_vectors(larger, [lowest])[0], "peak")
        peaks = f.splat(peak, "peak")
        gradient_at = self._gradient_at(row)

        def exponential(v: Int, mask: Value, so_far: Value) -> list[Value]:
            z = f.vload(logits, f.mul(v, f.lanes), "z")
            e = f.select(mask, vector_math.exp_nonpositive(f, f.fsub(z, peaks)), f.zero)
            if self.training:
                f.store(e, gradient_at(v))
            return [f.fadd(so_far, e)]

        total_of_row = f.reduce("add", self._over_vectors(exponential, [f.zero])[0], "sum")
        f.store(total_of_row, f["sums"], row)
        if self.training:
            self._cross_entropy_gradient(self._gradient_weight(row), label, total_of_row, gradient_at)
        chosen = f.load("float", logits, label, hint="chosen")
        term = self._cross_entropy_term(logits, peaks, f.fsub(peak, chosen, "term"))
        if self.weighted:
            weight = self._weight(row)
            f.store(weight, f["row_weights"], row)
            term = f.fmul(term, weight, "term")
        is_correct = f.compare("eq", self._first_peak(logits, peaks), label, "correct")
        more = f.op("i64", f"zext i1 {is_correct.text} to i64", "correct")
        return [self._add_scalar(total, term), f.i64(f.add(correct, more, "correct"))]

    def _cross_entropy_term(self, logits: Value, peaks: Value, term: Value) -> Value:
        """The row's loss without the logarithm of its sum: `term`, mixed with the mean gap to the peak if smoothed."""
        f = self.f
        if not self.smooths:
            return term

        def add(v: Int, mask: Value, so_far: Value) -> list[Value]:
            gap = f.fsub(peaks, f.vload(logits, f.mul(v, f.lanes)))
            return [f.fadd(so_far, f.select(mask, gap, f.zero))]

        gaps = f.reduce("add", self._over_vectors(add, [f.zero])[0], "gaps")
        mean = f.fmul(gaps, f["inverse_classes"], "mean")
        smoothing = f.first(self.smoothing)
        certain = f.fsub(f.scalar(1.0), smoothing)
        return f.fma(smoothing, mean, f.fmul(certain, term), "term")

    def _cross_entropy_gradient(
        self, row_weight: Value, label: Value, total: Value, gradient_at: Callable[[Int], Value]
    ) -> None:
        """(softmax - target) * row_weight."""
        f = self.f
        scale = f.fdiv(row_weight, f.splat(total), "scale")
        off: Value | None = None
        target_weight = row_weight
        if self.smooths:
            # From one product, so that a network of one class has a gradient of exactly zero, as in PyTorch.
            smoothed = f.fmul(row_weight, self.smoothing, "smoothed")
            target_weight = f.fsub(row_weight, smoothed)
            negative = f.op("float", f"fneg float {f['inverse_classes'].text}", "negative")
            off = f.fmul(smoothed, f.splat(negative), "off")

        def scaled(v: Int, mask: Value) -> None:
            e = f.vload(gradient_at(v))
            f.store(f.fma(e, scale, off) if off else f.fmul(e, scale), gradient_at(v))

        self._over_vectors(scaled, [])
        shift = int(math.log2(f.lanes))
        vector = f.op("i64", f"lshr i64 {label.text}, {shift}", "vector")
        lane = f.op("i64", f"and i64 {label.text}, {f.lanes - 1}", "lane")
        at = f.at(gradient_at(vector), lane)
        f.store(f.fsub(f.load("float", at), f.first(target_weight)), at)

    def _first_peak(self, logits: Value, peaks: Value) -> Value:
        """The first class whose logit is the maximum."""
        f = self.f
        small = f"i{f.lanes}"

        def earlier(v: Int, mask: Value, found: Value) -> list[Value]:
            z = f.vload(logits, f.mul(v, f.lanes), "z")
            equal = f.binary("and", f.compare("oeq", z, peaks), mask, "equal")
            bits = f.op(small, f"bitcast {equal.type} {equal.text} to {small}", "bits")
            wide = f.op("i64", f"zext {small} {bits.text} to i64", "bits")
            lane = f.intrinsic("i64", "cttz.i64", wide, Value("i1", "false"), hint="lane")
            number = f.i64(f.add(lane, f.mul(v, f.lanes)))
            candidate = f.select(f.compare("eq", wide, Value("i64", "0")), f["classes"], number)
            return [f.intrinsic("i64", "umin.i64", found, candidate, hint="found")]

        return self._over_vectors(earlier, [f["classes"]])[0]

    def _elementwise_row(self, row: Int, total: Value, correct: Value) -> list[Value]:
        """Mean squared error or binary cross-entropy."""
        f = self.f
        outputs = f.at(f["outputs"], f.mul(row, f["pitch"]), hint="outputs")
        targets = f.at(f["targets"], f.mul(self._sample(row), f["classes"]), hint="targets")
        gradient_at = self._gradient_at(row)
        weight = self._gradient_weight(row) if self.training else f.zero

        def element(v: Int, mask: Value, so_far: Value, correct: Value) -> list[Value]:
            z = f.vload(outputs, f.mul(v, f.lanes), "z")
            target = f.vload_where(mask, f.at(targets, f.mul(v, f.lanes)), hint="target")
            if self.loss == "bce_with_logits":
                term, gradient = _binary_cross_entropy(f, z, target)
                correct = self._count_sides(z, target, mask, correct)
            else:
                gap = f.fsub(z, target, "gap")
                term, gradient = f.fmul(gap, gap), f.fadd(gap, gap)
            if self.training:
                f.store(f.fmul(gradient, weight), gradient_at(v))
            return [f.fadd(so_far, f.select(mask, term, f.zero)), correct]

        terms, correct = self._over_vectors(element, [f.zero, correct])
        sum_of_row = f.reduce("add", terms)
        if self.weighted:
            sum_of_row = f.fmul(sum_of_row, self._weight(row))
        return [self._add_scalar(total, sum_of_row), correct]

    def _count_sides(self, z: Value, target: Value, mask: Value, correct: Value) -> Value:
        f = self.f
        differ = f.binary("xor", f.compare("ogt", target, f.constant(0.5)), f.compare("ogt", z, f.zero))
        same = f.select(differ, Value(mask.type, "zeroinitializer"), mask, "same")
        small = f"i{f.lanes}"
        bits = f.op(small, f"bitcast {same.type} {same.text} to {small}", "bits")
        wide = f.op("i64", f"zext {small} {bits.text} to i64", "bits")
        return f.i64(f.add(correct, f.intrinsic("i64", "ctpop.i64", wide), "correct"))


def _binary_cross_entropy(f: Function, z: Value, target: Value) -> tuple[Value, Value]:
    """max(z, 0) - z * target + log(1 + exp(-|z|)) and sigmoid(z) - target."""
    magnitude = f.intrinsic(f.vector, f"fabs.v{f.lanes}f32", z, hint="magnitude")
    small = vector_math.exp_nonpositive(f, f.op(f.vector, f"fneg {f.vector} {magnitude.text}", "negated"))
    above = f.at_least(z, f.zero)
    negated = f.op(f.vector, f"fneg {f.vector} {z.text}", "negated")
    term = f.fadd(f.fma(negated, target, above), vector_math.log1p_unit(f, small), "term")
    return term, f.fsub(vector_math.sigmoid_from_decay(f, z, small), target)
