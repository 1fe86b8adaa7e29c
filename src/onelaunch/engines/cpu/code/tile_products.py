"""Products of bf16 operands in AMX tiles, which add 16 x 16 sums of 32 products each in one instruction.

A *block* is four tiles, 32 x 32 sums in fp32. It is written to memory, and vector code does the rest: bias and relu, or the
optimizer's update. With two planes per operand (pack.py) a block adds three products: both first planes, and each first plane
with the other's second. The product of the second planes is below the rounding of the sum.

    forward   left: rows of the batch       right: panels of the weights, packed one at a time
    dX        left: rows of the weights,    right: the transposed gradient
              packed 32 at a time
    dW        left: the inputs transposed   right: the gradient's panels                          then the update

On a machine without AMX the tests use `emulated` blocks: the same sums in vector code.
"""

from __future__ import annotations

from collections.abc import Callable

from onelaunch.engines.cpu.code import pack
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.optimizer import Update, UpdateRule
from onelaunch.engines.cpu.code.pack import BLOCK, PAIR_BYTES, STEP_BYTES, TERMS, TILE_ROWS
from onelaunch.engines.cpu.code.update import NEXT_ROWS, NextRows, first_position

STEP_OF_PAIRS = TERMS // 2 * PAIR_BYTES  # bytes of a right operand per step
# `left` has rows `left_row` bytes apart, `right` a panel of pairs; `steps` steps of 32 terms. `block` is memory for a block,
# `plane` and `left_plane` are the bytes from one plane to the next.
SHARED = "ptr left, i64 left_row, i64 left_plane, ptr right, i64 plane, i64 steps, ptr block"
FORWARD = Kernel(
    "tile_forward",
    f"{SHARED}, ptr weights, i64 weights_panel, i64 panels, i64 width, i64 rows, ptr bias, ptr c, i64 c_row, "
    "i64 batch_rows, float floor",
)
# Rows [first, last) of the weights are packed as by pack.PACK_ROWS.
INPUT_GRADIENT = Kernel(
    "tile_input_gradient",
    f"{SHARED}, ptr weights, i64 source_row, i64 source_step, i64 last_row, i64 last_columns, i64 step_bytes, "
    "i64 right_panel, i64 panels, i64 first, i64 last, ptr c, i64 c_panel, i64 width",
)
WEIGHT_UPDATE = Kernel(
    "tile_weight_update",
    f"{SHARED}, i64 right_panel, i64 panels, i64 width, i64 first, i64 last, ptr weights, i64 weights_panel, "
    f"i64 state_stride, ptr hyper, {NEXT_ROWS}",
    "order next_rows scalars",
)


def emit(module: Module, planes: int) -> None:
    """What is shaped by the number of planes alone: the packing, the forward pass and dX."""
    pack.emit(module, planes)
    module.kernel(FORWARD, lambda f: _forward(f, planes))
    module.kernel(INPUT_GRADIENT, lambda f: _input_gradient(f, planes))


def emit_update(module: Module, planes: int, rule: UpdateRule) -> None:
    module.kernel(WEIGHT_UPDATE, lambda f: _weight_update(f, planes, rule))


def _forward(f: Function, planes: int) -> None:
    release = _configure(f)
    floor = f.splat(f["floor"], "floor")

    def panel(number: Int) -> None:
        weights = f.at(f["weights"], f.mul(number, f["weights_panel"]), hint="weights")
        pack.call_pairs(f, weights, f["right"], planes)
        column = f.mul(number, f["width"])
        bias, c = f.at(f["bias"], column, hint="bias"), f.at(f["c"], column, hint="c")

        def rows(first: Int) -> None:
            left = f.at(f["left"], f.mul(first, f["left_row"]), "i8", "left")
            _call_block(f, planes, left, STEP_BYTES, f["right"])

            def store(row: Int, vector: Int, value: Value) -> None:
                total = f.fadd(value, f.vload(bias, vector), "total")
                place = f.add(f.mul(f.add(first, row), f["c_row"]), vector)
                f.store(f.at_least(total, floor, "result"), c, place)

            _over_block(f, f.minimum(f.sub(f["batch_rows"], first), BLOCK), store)

        f.loop(f["batch_rows"], rows, step=BLOCK, index="rows")

    f.loop(f["panels"], panel, index="panel")
    release()


def _input_gradient(f: Function, planes: int) -> None:
    release = _configure(f)

    def rows(first: Int) -> None:
        valid = f.minimum(f.sub(f["last"], first), BLOCK)
        pack.call_rows(f, planes, f["weights"], f["left"], first, valid, f["left_row"], f["left_plane"])

        def panel(number: Int) -> None:
            right = f.at(f["right"], f.mul(number, f["right_panel"]), "i8", "right")
            c = f.at(f["c"], f.mul(number, f["c_panel"]), hint="c")
            _call_block(f, planes, f["left"], f["step_bytes"], right)

            def store(row: Int, vector: Int, value: Value) -> None:
                f.store(value, c, f.add(f.mul(f.add(first, row), f["width"]), vector))

            _over_block(f, valid, store)

        f.loop(f["panels"], panel, index="panel")

    f.loop(f["last"], rows, start=f["first"], step=BLOCK, index="rows")
    release()


def _weight_update(f: Function, planes: int, rule: UpdateRule) -> None:
    release = _configure(f)
    update = Update(f, rule, f["scalars"], f["hyper"])
    f.arguments["position"] = first_position(f)
    next_rows = NextRows(f)

    def panel(number: Int) -> None:
        right = f.at(f["right"], f.mul(number, f["right_panel"]), "i8", "right")
        weights = f.at(f["weights"], f.mul(number, f["weights_panel"]), hint="weights")

        def rows(first: Int) -> None:
            left = f.at(f["left"], f.mul(first, f["left_row"]), "i8", "left")
            next_rows.prefetch_pieces()
            _call_block(f, planes, left, STEP_BYTES, right)
            copies = update.copies(f.at(weights, f.mul(first, f["width"])), f["state_stride"])

            def store(row: Int, vector: Int, value: Value) -> None:
                update.apply(value, copies, f.add(f.mul(row, f["width"]), vector))

            _over_block(f, f.minimum(f.sub(f["last"], first), BLOCK), store)

        f.loop(f["last"], rows, start=f["first"], step=BLOCK, index="rows")

    f.loop(f["panels"], panel, index="panel")
    release()


def _over_block(f: Function, rows: Value, store: Callable[[Int, Int, Value], None]) -> None:
    """Call `store(row, column, vector)` for the first `rows` rows of the block and the field `width` of its columns."""

    def over(vectors: int) -> None:
        def row(number: Int) -> None:
            for vector in range(vectors):
                column = vector * f.lanes
                store(number, column, f.vload(f["block"], f.add(f.mul(number, BLOCK), column), "sums"))

        f.loop(rows, row, index="row")

    f.either(f.compare("eq", f["width"], f.i64(BLOCK), "wide"), lambda: over(2), lambda: over(1))


def _call_block(f: Function, planes: int, left: Value, left_step: Int, right: Value) -> None:
    names = ("left_row", "left_plane", "plane", "steps", "block")
    f.call(_block(f.module, planes), left, left_step, right, *(f[name] for name in names))


def _block(module: Module, planes: int) -> str:
    """The sums of a block: over the pairs of planes, and over the steps of 32 terms."""
    make = _tile_block if module.target.has_tiles else _emulated_block
    parameters = (
        "ptr %left, i64 %left_step, ptr %right, i64 %left_row, i64 %left_plane, i64 %plane, i64 %steps, ptr %block"
    )
    return module.function(f"block_{planes}", parameters, lambda f: make(f, planes))


def _operands(f: Function, planes: int) -> list[tuple[Value, Value]]:
    """The left and right operands of the products that a block adds, the smallest last."""
    left = [f.at(f["left"], f.mul(n, f["left_plane"]), "i8", "left") for n in range(planes)]
    right = [f.at(f["right"], f.mul(n, f["plane"]), "i8", "right") for n in range(planes)]
    pairs = [(a, b) for a in range(planes) for b in range(planes) if a + b < planes]
    return [(left[a], right[b]) for a, b in sorted(pairs, key=sum)]


def _tile_block(f: Function, planes: int) -> None:
    """Tiles 0 to 3 are the sums, 4 and 5 the left operand, 6 and 7 the right one."""

    def tile(number: int) -> Value:
        return Value("i8", str(number))

    def load(number: int, at: Value, stride: Value) -> None:
        f.intrinsic("void", "x86.tileloadd64", tile(number), at, stride)

    for number in range(4):
        f.intrinsic("void", "x86.tilezero", tile(number))
    lower = f.mul(f["left_row"], TILE_ROWS)
    for left, right in _operands(f, planes):

        def step(number: Int, left: Value = left, right: Value = right) -> None:
            a = f.at(left, f.mul(number, f["left_step"]), "i8", "a")
            b = f.at(right, f.mul(number, STEP_OF_PAIRS), "i8", "b")
            load(6, b, f.i64(PAIR_BYTES))
            load(4, a, f["left_row"])
            f.intrinsic("void", "x86.tdpbf16ps", tile(0), tile(4), tile(6))
            load(7, f.at(b, PAIR_BYTES // 2, "i8"), f.i64(PAIR_BYTES))
            f.intrinsic("void", "x86.tdpbf16ps", tile(1), tile(4), tile(7))
            load(5, f.at(a, lower, "i8"), f["left_row"])
            f.intrinsic("void", "x86.tdpbf16ps", tile(2), tile(5), tile(6))
            f.intrinsic("void", "x86.tdpbf16ps", tile(3), tile(5), tile(7))

        f.loop(f["steps"], step, index="step")
    for number in range(4):
        at = f.at(f["block"], number // 2 * TILE_ROWS * BLOCK + number % 2 * TILE_ROWS)
        f.intrinsic("void", "x86.tilestored64", tile(number), at, f.i64(4 * BLOCK))


def _emulated_block(f: Function, planes: int) -> None:
    def floats(words: Value) -> tuple[Value, Value]:
        """The two bf16 numbers in each 32-bit word."""
        low = f.binary("shl", words, f.integer(16), "low")
        high = f.binary("and", words, f.integer(-(2**16)), "high")
        first, second = (f.op(f.vector, f"bitcast {f.integers} {half.text} to {f.vector}") for half in (low, high))
        return first, second

    def row(number: Int) -> None:
        sums: list[Value] = [f.zero, f.zero]
        for left, right in _operands(f, planes):

            def step(index: Int, *totals: Value, left: Value = left, right: Value = right) -> list[Value]:
                a_row = f.at(left, f.add(f.mul(index, f["left_step"]), f.mul(number, f["left_row"])), "i8", "a")
                b_step = f.at(right, f.mul(index, STEP_OF_PAIRS), "i8", "b")

                def pair(position: Int, *now: Value) -> list[Value]:
                    a = floats(f.splat(f.load("i32", a_row, position, element="i32"), "a"))
                    found = list(now)
                    for half in range(2):
                        at = f.at(b_step, f.add(f.mul(position, PAIR_BYTES // 4), half * f.lanes), hint="b")
                        for one, other in zip(a, floats(f.load(f.integers, at)), strict=True):
                            found[half] = f.fma(one, other, found[half], "sum")
                    return found

                return f.loop(TERMS // 2, pair, carry=totals, index="pair")

            sums = f.loop(f["steps"], step, carry=sums, index="step")
        for half, value in enumerate(sums):
            f.store(value, f["block"], f.add(f.mul(number, BLOCK), half * f.lanes))

    f.loop(BLOCK, row, index="row")


def _configure(f: Function) -> Callable[[], None]:
    """Set up eight tiles of 16 rows of 64 bytes; the returned function gives them back."""
    if not f.target.has_tiles:
        return lambda: None
    words = {0: 1, 2: 0x0040_0040_0040_0040, 3: 0x0040_0040_0040_0040, 6: 0x1010_1010_1010_1010}  # palette, bytes, rows
    configuration = f.op("ptr", "alloca [8 x i64], align 64", "configuration")
    for position in range(8):
        f.store(f.i64(words.get(position, 0)), configuration, position, element="i64")
    f.intrinsic("void", "x86.ldtilecfg", configuration)

    def release() -> None:
        f.intrinsic("void", "x86.tilerelease")

    return release
