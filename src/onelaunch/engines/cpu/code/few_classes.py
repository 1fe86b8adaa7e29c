"""Cross-entropy for at most `lanes` classes, `lanes` rows at a time: a vector holds one class of many rows.

The logits are transposed in registers, so that maximum and sum over classes are plain vector operations and every lane of
an exponential is used. The gradient has the transposed layout that dX reads, and is transposed once more for dW. On
64-32-10 with batch 32, the phase of the last product and the loss takes 0.94 µs; with a loop over rows it took 1.42 µs.
"""

from __future__ import annotations

import functools

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gradient import transpose
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.engines.cpu.plan.plan import HYPERPARAMETERS, SCALARS, Plan

BLOCK_PARAMETERS = (
    "ptr %outputs, ptr %targets, ptr %order, i64 %rows, ptr %panel, ptr %transposed, ptr %scalars, ptr %hyper, ptr %loss, "
    "ptr %tally"
)


def applies(plan: Plan, *, training: bool) -> bool:
    """Whether this file's block can compute the loss. In training nothing may follow the last Linear: the gradient of its
    output must be that of its product."""
    few = plan.settings.loss == "cross_entropy" and plan.last.width <= plan.lanes
    return few and (plan.last.is_plain or not training)


def block(module: Module, plan: Plan, *, training: bool, batch_width: int) -> str:
    """`(outputs, targets, order, rows, panel, transposed, ...)`: `lanes` rows, of which the first `rows` are real."""
    name = f"few_classes_train_b{batch_width}" if training else "few_classes_validate"
    parameters = BLOCK_PARAMETERS + ", ptr %weights" * (training and plan.settings.weighted)
    return module.function(name, parameters, lambda f: _Block(f, plan, training, batch_width).emit())


class _Block:
    def __init__(self, f: Function, plan: Plan, training: bool, batch_width: int) -> None:
        self.f, self.plan, self.training, self.batch_width = f, plan, training, batch_width
        self.classes = plan.last.width
        self.weighted = training and plan.settings.weighted

    def emit(self) -> None:
        f = self.f
        rows = f.op("i32", f"trunc i64 {f['rows'].text} to i32", "rows")
        self.valid = f.compare("slt", f.lane_numbers(), f.splat(rows, "rows"), "valid")
        pitch = self.plan.pitch(self.plan.last)
        logits = transpose(f, [f.vload(f["outputs"], row * pitch, "logits") for row in range(f.lanes)])[: self.classes]
        peak = functools.reduce(lambda largest, z: f.at_least(z, largest, "peak"), logits)
        exponentials = [vector_math.exp_nonpositive(f, f.fsub(z, peak)) for z in logits]
        total = functools.reduce(lambda a, b: f.fadd(a, b, "sum"), exponentials)
        index = self._samples()
        found = self._gathered(f["targets"], index, "i64", 8)
        labels = f.op(f.integers, f"trunc {found.type} {found.text} to {f.integers}", "labels")
        self.weights = self._gathered(f["weights"], index, "float", 4) if self.weighted else None
        is_label = [f.compare("eq", labels, f.integer(number), "is_label") for number in range(self.classes)]
        self._add_loss(logits, peak, total, is_label)
        self._count_correct(logits, peak, labels)
        if self.training:
            self._store_gradient(exponentials, total, is_label)

    def _samples(self) -> Value:
        """The rows' numbers in the data, as i64."""
        f = self.f
        wide = f"<{f.lanes} x i64>"
        samples = f.load(f.integers, f["order"], element="i32", hint="samples") if self.training else f.lane_numbers()
        return f.op(wide, f"zext {f.integers} {samples.text} to {wide}", "samples")

    def _gathered(self, start: Value, index: Value, element: str, size: int) -> Value:
        """The elements of `size` bytes at `index`, of the valid lanes: after the last row there may be no memory, and no row
        indices."""
        f = self.f
        vector, pointers = f"<{f.lanes} x {element}>", f"<{f.lanes} x ptr>"
        at = f.op(pointers, f"getelementptr {element}, ptr {start.text}, {index.type} {index.text}", "addresses")
        name = f"masked.gather.v{f.lanes}{'f32' if element == 'float' else element}.v{f.lanes}p0"
        f.module.declarations[f"declare {vector} @llvm.{name}({pointers}, i32, {self.valid.type}, {vector})"] = None
        call = f"call {vector} @llvm.{name}({pointers} {at.text}, i32 {size}, {self.valid.type} {self.valid.text}, "
        return f.op(vector, f"{call}{vector} zeroinitializer)", "gathered")

    def _label_smoothing(self) -> Value:
        f = self.f
        return f.splat(f.load("float", f["hyper"], HYPERPARAMETERS.index("label_smoothing"), hint="label_smoothing"))

    def _add_loss(self, logits: list[Value], peak: Value, total: Value, is_label: list[Value]) -> None:
        f = self.f
        chosen = f.zero
        for z, matches in zip(logits, is_label, strict=True):
            chosen = f.select(matches, z, chosen, "chosen")
        term = f.fsub(peak, chosen, "term")
        if self.plan.settings.label_smoothing:
            gaps = functools.reduce(f.fadd, [f.fsub(peak, z) for z in logits])
            mean, smoothing = f.fmul(gaps, f.constant(1 / self.classes)), self._label_smoothing()
            term = f.fma(smoothing, mean, f.fmul(f.fsub(f.constant(1.0), smoothing), term), "term")
        term = f.select(self.valid, f.fadd(term, vector_math.log(f, total)), f.zero, "term")
        if self.weights:
            term = f.fmul(term, self.weights, "term")
        added = f.op("double", f"fpext float {f.reduce('add', term).text} to double", "added")
        f.store(f.fadd(f.load("double", f["loss"]), added), f["loss"])

    def _count_correct(self, logits: list[Value], peak: Value, labels: Value) -> None:
        f = self.f
        first = f.integer(-1)
        for number in reversed(range(self.classes)):
            first = f.select(f.compare("oeq", logits[number], peak), f.integer(number), first, "first")
        correct = f.binary("and", f.compare("eq", first, labels), self.valid, "correct")
        mask = f.op(f"i{f.lanes}", f"bitcast {correct.type} {correct.text} to i{f.lanes}", "mask")
        wide = f.op("i64", f"zext i{f.lanes} {mask.text} to i64", "mask")
        count = f.intrinsic("i64", "ctpop.i64", wide, hint="correct")
        f.store(f.i64(f.add(f.load("i64", f["tally"]), count)), f["tally"])

    def _store_gradient(self, exponentials: list[Value], total: Value, is_label: list[Value]) -> None:
        """(softmax - target) * row_weight, and zero for rows past the end of the batch."""
        f = self.f
        weight = f.splat(f.load("float", f["scalars"], SCALARS.index("row_weight"), hint="row_weight"), "row_weight")
        if self.weights:
            weight = f.fmul(weight, self.weights, "row_weight")
        target, off = weight, f.zero
        if self.plan.settings.label_smoothing:
            smoothed = f.fmul(weight, self._label_smoothing(), "smoothed")
            target, off = f.fsub(weight, smoothed), f.fmul(smoothed, f.constant(-1 / self.classes))
        scale = f.fdiv(weight, total, "scale")
        width = min(self.plan.panel_width, self.plan.padded(self.plan.last))
        columns = []
        for number, (e, matches) in enumerate(zip(exponentials, is_label, strict=True)):
            gradient = f.fma(e, scale, off) if self.plan.settings.label_smoothing else f.fmul(e, scale)
            gradient = f.fsub(gradient, f.select(matches, target, f.zero))
            gradient = f.select(self.valid, gradient, f.zero, "gradient")
            f.store(gradient, f["transposed"], number * self.batch_width)
            columns.append(gradient)
        rows = transpose(f, columns + [f.zero] * (f.lanes - self.classes))
        for number, row in enumerate(rows):
            f.store(row, f["panel"], number * width)
