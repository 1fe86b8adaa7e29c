"""Cross-entropy for at most `lanes` classes, `lanes` rows at a time: a vector holds one class of many rows.

The logits are transposed in registers, so that maximum and sum over classes are plain vector operations and every lane of
an exponential is used. The gradient has the transposed layout that dX reads, and is transposed once more for dW. On
64-32-10 with batch 32, the phase of the last product and the loss takes 0.94 µs; with a loop over rows it took 1.42 µs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gradient import transpose
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.loss import LOSS_FIELDS, LOSS_STEP, loss_address, row_weight, smoothing
from onelaunch.engines.cpu.plan.plan import Plan

UNROLL = 4  # classes whose exponentials are computed side by side
# From row `wide_rows` on, the batch panel has `lanes` rows instead of twice as many.
FEW_CLASSES = Kernel("few_classes", f"{LOSS_FIELDS}, ptr transposed, i64 wide_rows", LOSS_STEP)


def applies(plan: Plan, *, training: bool) -> bool:
    """Whether this kernel can compute the loss. In training nothing may follow the last Linear: the gradient of its
    output must be that of its product."""
    few = plan.settings.loss == "cross_entropy" and plan.last.width <= plan.lanes
    return few and (plan.last.is_plain or not training)


def emit(module: Module, training: bool, smooths: bool, weighted: bool) -> None:
    """`weighted`: rows have weights in the loss."""
    module.kernel(FEW_CLASSES, lambda f: _FewClasses(f, training, smooths, weighted).emit())


class _FewClasses:
    def __init__(self, f: Function, training: bool, smooths: bool, weighted: bool) -> None:
        self.f, self.training, self.smooths, self.weighted = f, training, smooths, weighted

    def emit(self) -> None:
        f = self.f
        size = f.lanes * f.lanes
        self.logits, self.exponentials = (
            f.op("ptr", f"alloca [{size} x float], align 64", name) for name in ("logits", "exponentials")
        )
        f.loop(size, lambda at: f.store(f.zero, self.exponentials, at), step=f.lanes, index="zero")
        self.loss = loss_address(f, self.training)
        self.smoothing = smoothing(f) if self.smooths else f.zero
        self.weight = row_weight(f) if self.training else f.zero
        if self.training:
            f.store(Value("double", "0.0"), self.loss)
        f.loop(f["last"], self._block, start=f["first"], step=f.lanes, index="block")

    def _block(self, row: Int) -> None:
        f = self.f
        valid = f.lanes_below(f.sub(f["rows"], row), "valid")
        outputs = f.at(f["outputs"], f.mul(row, f["pitch"]), hint="outputs")
        rows = [f.vload(outputs, f.mul(number, f["pitch"]), "logits") for number in range(f.lanes)]
        for number, z in enumerate(transpose(f, rows)):
            f.store(z, self.logits, number * f.lanes)
        labels, weights = self._labels_and_weights(row, valid)
        # Classes are taken UNROLL at a time; those past the last have a logit of minus infinity.
        lowest = f.constant(-math.inf)
        self._past_the_last(lambda at: f.store(lowest, self.logits, at))

        def higher(number: Int, peak: Value) -> list[Value]:
            for n in range(UNROLL):
                peak = f.at_least(self._logit(f.add(number, n)), peak, "peak")
            return [peak]

        peak = f.loop(f["classes"], higher, step=UNROLL, carry=[lowest], index="class")[0]

        def some(number: Int, total: Value, chosen: Value, first: Value) -> list[Value]:
            numbers = [f.add(number, n) for n in range(UNROLL)]
            logits = [self._logit(n) for n in numbers]
            exponentials = [vector_math.exp_nonpositive(f, f.fsub(z, peak)) for z in logits]
            for n, z, e in zip(numbers, logits, exponentials, strict=True):
                f.store(e, self.exponentials, f.mul(n, f.lanes))
                index = self._number(n)
                total = f.fadd(total, e, "sum")
                chosen = f.select(f.compare("eq", labels, index), z, chosen, "chosen")
                at_peak = f.select(f.compare("oeq", z, peak), index, f.integer(-1))
                first = f.intrinsic(f.integers, f"umin.v{f.lanes}i32", first, at_peak, hint="first")
            return [total, chosen, first]

        total, chosen, first = f.loop(
            f["classes"], some, step=UNROLL, carry=[f.zero, f.zero, f.integer(-1)], index="class"
        )
        gaps = f.zero
        if self.smooths:
            gaps = f.loop(
                f["classes"],
                lambda n, so_far: [f.fadd(so_far, f.fsub(peak, self._logit(n)))],
                carry=[gaps],
                index="class",
            )[0]
        self._add_loss(f.fsub(peak, chosen, "term"), gaps, total, valid, weights)
        self._count_correct(first, labels, valid)
        if self.training:
            self._store_gradient(row, total, labels, valid, weights)

    def _past_the_last(self, body: Callable[[Int], None]) -> None:
        """Call `body(position of a class)` for the classes that only fill up the last group."""
        f = self.f
        end = f.op("i64", f"and i64 {f.i64(f.add(f['classes'], UNROLL - 1)).text}, {-UNROLL}", "end")
        f.loop(end, lambda number: body(f.mul(number, f.lanes)), start=f["classes"], index="past")

    def _logit(self, number: Int) -> Value:
        return self.f.vload(self.logits, self.f.mul(number, self.f.lanes), "z")

    def _number(self, number: Int) -> Value:
        f = self.f
        return f.splat(f.op("i32", f"trunc i64 {f.i64(number).text} to i32", "class"), "class")

    def _labels_and_weights(self, row: Int, valid: Value) -> tuple[Value, Value | None]:
        f = self.f
        wide = f"<{f.lanes} x i64>"
        if self.training:
            samples = f.load(f.integers, f["order"], row, element="i32", hint="samples")
            targets = f["targets"]
        else:
            samples = f.lane_numbers()
            targets = f.at(f["targets"], f.add(f["first_row"], row), "i64", "targets")
        index = f.op(wide, f"zext {f.integers} {samples.text} to {wide}", "samples")
        found = self._gathered(targets, index, valid, "i64", 8)
        labels = f.op(f.integers, f"trunc {wide} {found.text} to {f.integers}", "labels")
        return labels, self._gathered(f["weights"], index, valid, "float", 4) if self.weighted else None

    def _gathered(self, start: Value, index: Value, valid: Value, element: str, size: int) -> Value:
        """The elements of `size` bytes at `index`, of the valid lanes: after the last row there may be no memory, and no row
        indices."""
        f = self.f
        vector, pointers = f"<{f.lanes} x {element}>", f"<{f.lanes} x ptr>"
        at = f.op(pointers, f"getelementptr {element}, ptr {start.text}, {index.type} {index.text}", "addresses")
        name = f"masked.gather.v{f.lanes}{'f32' if element == 'float' else element}.v{f.lanes}p0"
        f.module.declarations[f"declare {vector} @llvm.{name}({pointers}, i32, {valid.type}, {vector})"] = None
        call = f"call {vector} @llvm.{name}({pointers} {at.text}, i32 {size}, {valid.type} {valid.text}, "
        return f.op(vector, f"{call}{vector} zeroinitializer)", "gathered")

    def _add_loss(self, term: Value, gaps: Value, total: Value, valid: Value, weights: Value | None) -> None:
        f = self.f
        if self.smooths:
            mean = f.fmul(gaps, f.splat(f["inverse_classes"], "inverse"))
            term = f.fma(self.smoothing, mean, f.fmul(f.fsub(f.constant(1.0), self.smoothing), term), "term")
        term = f.select(valid, f.fadd(term, vector_math.log(f, total)), f.zero, "term")
        if weights:
            term = f.fmul(term, weights, "term")
        added = f.op("double", f"fpext float {f.reduce('add', term).text} to double", "added")
        f.store(f.fadd(f.load("double", self.loss), added), self.loss)

    def _count_correct(self, first: Value, labels: Value, valid: Value) -> None:
        f = self.f
        correct = f.binary("and", f.compare("eq", first, labels), valid, "correct")
        mask = f.op(f"i{f.lanes}", f"bitcast {correct.type} {correct.text} to i{f.lanes}", "mask")
        wide = f.op("i64", f"zext i{f.lanes} {mask.text} to i64", "mask")
        count = f.intrinsic("i64", "ctpop.i64", wide, hint="correct")
        f.store(f.i64(f.add(f.load("i64", f["tally"]), count)), f["tally"])

    def _store_gradient(self, row: Int, total: Value, labels: Value, valid: Value, weights: Value | None) -> None:
        """(softmax - target) * row_weight, and zero for rows past the end of the batch."""
        f = self.f
        weight = f.fmul(self.weight, weights, "row_weight") if weights else self.weight
        target, off = weight, f.zero
        if self.smooths:
            smoothed = f.fmul(weight, self.smoothing, "smoothed")
            negative = f.op("float", f"fneg float {f['inverse_classes'].text}", "negative")
            target, off = f.fsub(weight, smoothed), f.fmul(smoothed, f.splat(negative))
        scale = f.fdiv(weight, total, "scale")
        # These rows are columns of a batch panel: the panel's start, and the row inside it.
        inside = f.op("i64", f"and i64 {f.i64(row).text}, {2 * f.lanes - 1}", "inside")
        is_wide = f.compare("slt", f.i64(row), f["wide_rows"], "is_wide")
        batch_width = f.select(is_wide, f.i64(2 * f.lanes), f.i64(f.lanes), "batch_width")
        transposed = f.at(f["transposed"], f.add(f.mul(f.sub(row, inside), f.lanes), inside), hint="transposed")

        def one(number: Int) -> None:
            at = f.mul(number, f.lanes)
            e = f.vload(self.exponentials, at, "e")
            gradient = f.fma(e, scale, off) if self.smooths else f.fmul(e, scale)
            matches = f.compare("eq", labels, self._number(number), "matches")
            gradient = f.fsub(gradient, f.select(matches, target, f.zero))
            gradient = f.select(valid, gradient, f.zero, "gradient")
            f.store(gradient, transposed, f.mul(number, batch_width))
            f.store(gradient, self.exponentials, at)

        f.loop(f["classes"], one, index="class")
        self._past_the_last(lambda at: f.store(f.zero, self.exponentials, at))
        columns = [f.vload(self.exponentials, number * f.lanes, "column") for number in range(f.lanes)]
        panel = f.at(f["gradient"], f.mul(row, f.lanes), hint="panel")
        for number, values in enumerate(transpose(f, columns)):
            f.store(values, panel, number * f.lanes)
