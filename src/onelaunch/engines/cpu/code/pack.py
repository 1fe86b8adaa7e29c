"""Operands of tile products (tile_products.py) in bf16, packed from fp32 matrices.

    pack_rows         one row after another, 32 terms per step: the left operand
    pack_transposed   the same of the transposed matrix
    pack_pairs        pairs of rows interleaved, 32 columns wide: the right operand

A float is the sum of its `planes`: the nearest bf16 number, and the nearest one to the rest. Terms are padded to a multiple of
32 with zeros, so that no content of the padding reaches a result. A packed row beyond the last has any content.
"""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.gradient import transpose
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.product import by_parity
from onelaunch.engines.cpu.plan.division import TERMS

TILE_ROWS = 16
STEP_BYTES = 64  # TERMS numbers in bf16
PAIR_BYTES = 128  # a pair of rows of a right operand: 32 columns
BLOCK = 32  # rows and columns of a block of four tiles

# Step s has the columns [32 s, 32 s + 32) of a source; they are `source_step` floats apart, rows `source_row` floats. The last
# step has rows `last_row` floats apart and `last_columns` columns. The target's rows are `row_bytes`, its steps `step_bytes`
# and its planes `plane` bytes apart.
PACK_ROWS = Kernel(
    "pack_rows",
    "ptr source, ptr odd_source, i64 source_row, i64 source_step, i64 last_row, i64 last_columns, i64 first, i64 rows, "
    "i64 steps, ptr target, i64 row_bytes, i64 step_bytes, i64 plane",
    "j",
)
# `panels` panels of `width` columns, `source_panel` floats apart; rows [`rows`, 32 `steps`) are zero.
PACK_PAIRS = Kernel(
    "pack_pairs",
    "ptr source, i64 panels, i64 source_panel, i64 width, i64 rows, i64 steps, ptr target, i64 target_panel, i64 plane",
)
# The source has `rows` rows, which become terms, and `columns` columns, which become rows.
PACK_TRANSPOSED = Kernel(
    "pack_transposed",
    "ptr source, ptr odd_source, i64 source_row, i64 rows, i64 columns, i64 steps, ptr target, i64 row_bytes, i64 plane",
    "j",
)


def emit(module: Module, planes: int) -> None:
    module.kernel(PACK_ROWS, lambda f: _pack_rows(f, planes))
    module.kernel(PACK_PAIRS, lambda f: _pack_pairs(f, planes))
    module.kernel(PACK_TRANSPOSED, lambda f: _pack_transposed(f, planes))


def split(f: Function, first: Value, second: Value, planes: int) -> list[Value]:
    """The planes of two vectors, each as the 16-bit words of the first and then those of the second."""
    found = []
    for number in range(planes):
        found.append(_nearest(f, first, second))
        if number + 1 < planes:
            first, second = (
                f.fsub(value, _as_floats(f, _half(f, found[-1], part)), "rest")
                for part, value in enumerate((first, second))
            )
    return found


def _words(f: Function) -> str:
    return f"<{2 * f.lanes} x i16>"


def _half(f: Function, words: Value, part: int) -> Value:
    order = ", ".join(f"i32 {lane}" for lane in range(part * f.lanes, (part + 1) * f.lanes))
    shuffled = f"shufflevector {words.type} {words.text}, {words.type} poison, <{f.lanes} x i32> <{order}>"
    return f.op(f"<{f.lanes} x i16>", shuffled, "half")


def _as_floats(f: Function, words: Value) -> Value:
    bits = f.op(f.integers, f"zext {words.type} {words.text} to {f.integers}", "bits")
    return f.op(f.vector, f"bitcast {f.integers} {f.binary('shl', bits, f.integer(16)).text} to {f.vector}", "floats")


def _nearest(f: Function, first: Value, second: Value) -> Value:
    """The nearest bf16 numbers of two vectors, ties to even, as 16-bit words."""
    words = _words(f)
    if f.target.has_tiles:  # and the instruction for it
        narrow = f.intrinsic(
            f"<{2 * f.lanes} x bfloat>", "x86.avx512bf16.cvtne2ps2bf16.512", second, first, hint="narrow"
        )
        return f.op(words, f"bitcast {narrow.type} {narrow.text} to {words}", "plane")
    halves = []
    for value in (first, second):
        bits = f.op(f.integers, f"bitcast {value.type} {value.text} to {f.integers}", "bits")
        odd = f.binary("and", f.binary("lshr", bits, f.integer(16)), f.integer(1), "odd")
        rounded = f.binary("add", f.binary("add", bits, odd), f.integer(0x7FFF), "rounded")
        rounded = f.select(f.compare("uno", value, value, "is_nan"), bits, rounded)
        high = f.binary("lshr", rounded, f.integer(16), "high")
        halves.append(f.op(f"<{f.lanes} x i16>", f"trunc {f.integers} {high.text} to <{f.lanes} x i16>", "plane"))
    return _shuffle(f, halves[0], halves[1], list(range(2 * f.lanes)))


def _shuffle(f: Function, a: Value, b: Value, order: list[int]) -> Value:
    lanes = ", ".join(f"i32 {lane}" for lane in order)
    return f.op(
        f"<{len(order)} x i16>", f"shufflevector {a.type} {a.text}, {b.type} {b.text}, <{len(order)} x i32> <{lanes}>"
    )


def _store_words(f: Function, words: Value, at: Value) -> None:
    f.emit(f"store {words.type} {words.text}, ptr {at.text}, align 2")


def _pack_rows(f: Function, planes: int) -> None:
    source = by_parity(f, f["source"], f["odd_source"])
    call_rows(f, planes, source, f["target"], f["first"], f["rows"], f["row_bytes"], f["plane"])


def call_rows(f: Function, planes: int, source: Value, target: Value, first: Int, *sizes: Int) -> None:
    """Call the function that packs rows from `first` on; `sizes` are how many, and the target's row and plane in bytes."""
    names = ("source_row", "source_step", "last_row", "last_columns", "steps", "step_bytes")
    f.call(_rows_function(f.module, planes), source, target, first, *sizes, *(f[name] for name in names))


def _rows_function(module: Module, planes: int) -> str:
    def make(f: Function) -> None:
        last = f.i64(f.sub(f["steps"], 1))

        def step(number: Int) -> None:
            is_last = f.compare("eq", f.i64(number), last, "is_last")
            stride = f.select(is_last, f["last_row"], f["source_row"], "stride")
            columns = f.select(is_last, f["last_columns"], f.i64(TERMS), "columns")
            source = f.at(f["source"], f.mul(number, f["source_step"]), hint="source")
            target = f.at(f["target"], f.mul(number, f["step_bytes"]), "i8", "target")
            masks = [f.lanes_below(f.sub(columns, half * f.lanes)) for half in range(2)]

            def row(index: Int) -> None:
                start = f.at(source, f.mul(f.add(f["first"], index), stride), hint="row")
                to = f.at(target, f.mul(index, f["row_bytes"]), "i8", "to")
                halves = [f.vload_where(mask, f.at(start, half * f.lanes)) for half, mask in enumerate(masks)]
                for plane, words in enumerate(split(f, halves[0], halves[1], planes)):
                    _store_words(f, words, f.at(to, f.mul(plane, f["plane"]), "i8"))

            f.loop(f["rows"], row, index="row")

        f.loop(f["steps"], step, index="step")

    parameters = (
        "ptr %source, ptr %target, i64 %first, i64 %rows, i64 %row_bytes, i64 %plane, i64 %source_row, i64 %source_step, "
        "i64 %last_row, i64 %last_columns, i64 %steps, i64 %step_bytes"
    )
    return module.function(f"pack_{planes}_planes_of_rows", parameters, make)


def _pack_pairs(f: Function, planes: int) -> None:
    def panel(number: Int) -> None:
        source = f.at(f["source"], f.mul(number, f["source_panel"]), hint="source")
        target = f.at(f["target"], f.mul(number, f["target_panel"]), "i8", "target")
        call_pairs(f, source, target, planes)

    f.loop(f["panels"], panel, index="panel")


def call_pairs(f: Function, source: Value, target: Value, planes: int) -> None:
    """Call the function that packs one panel; its sizes are the fields `width`, `rows`, `steps` and `plane`."""
    f.call(
        _pairs_function(f.module, planes), source, target, *(f[name] for name in ("width", "rows", "steps", "plane"))
    )


def _pairs_function(module: Module, planes: int) -> str:
    def make(f: Function) -> None:
        interleaved = [row * f.lanes + lane for lane in range(f.lanes) for row in range(2)]
        # Columns beyond the width are zero, and so are rows beyond the last.
        columns = [f.lanes_below(f.sub(f["width"], half * f.lanes)) for half in range(2)]
        nothing = Value(columns[0].type, "zeroinitializer")

        def pair(number: Int, masks: list[list[Value]]) -> None:
            source = f.at(f["source"], f.mul(f.mul(number, 2), f["width"]), hint="source")
            target = f.at(f["target"], f.mul(number, PAIR_BYTES), "i8", "target")
            for half in range(2):
                places = [f.at(start, half * f.lanes) for start in (source, f.at(source, f["width"]))]
                rows = [f.vload_where(mask[half], place) for mask, place in zip(masks, places, strict=True)]
                for plane, words in enumerate(split(f, rows[0], rows[1], planes)):
                    both = _shuffle(f, words, Value(words.type, "poison"), interleaved)
                    _store_words(f, both, f.at(f.at(target, f.mul(plane, f["plane"]), "i8"), half * f.lanes))

        def last_pair(number: Int) -> None:
            first = f.i64(f.mul(number, 2))
            present = [f.compare("slt", f.i64(f.add(first, row)), f["rows"], "present") for row in range(2)]
            pair(number, [[f.select(exists, mask, nothing) for mask in columns] for exists in present])

        whole = f.op("i64", f"lshr i64 {f['rows'].text}, 1", "whole")
        f.loop(whole, lambda number: pair(number, [columns, columns]), index="pair")
        f.loop(f.mul(f["steps"], TERMS // 2), last_pair, start=whole, index="pair")

    parameters = "ptr %source, ptr %target, i64 %width, i64 %rows, i64 %steps, i64 %plane"
    return module.function(f"pack_{planes}_planes_of_pairs", parameters, make)


def _pack_transposed(f: Function, planes: int) -> None:
    source = by_parity(f, f["source"], f["odd_source"])

    def block(column: Int) -> None:
        columns = f.lanes_below(f.sub(f["columns"], column))
        nothing = Value(columns.type, "zeroinitializer")

        def terms(first: Int) -> None:
            halves = []
            for half in range(2):
                start = f.i64(f.add(first, half * f.lanes))
                places = f.rows(f.at(source, f.add(f.mul(start, f["source_row"]), column)), f["source_row"], f.lanes)
                rows = []
                for row in range(f.lanes):
                    present = f.compare("slt", f.i64(f.add(start, row)), f["rows"], "present")
                    rows.append(f.vload_where(f.select(present, columns, nothing, "mask"), places[row]))
                halves.append(transpose(f, rows))
            to = f.at(f.at(f["target"], f.mul(column, f["row_bytes"]), "i8"), first, "i16", "to")
            for at, first_half, second_half in zip(
                f.rows(to, f["row_floats"], f.lanes), halves[0], halves[1], strict=True
            ):
                for plane, words in enumerate(split(f, first_half, second_half, planes)):
                    _store_words(f, words, f.at(at, f.mul(plane, f["plane"]), "i8"))

        f.loop(f.mul(f["steps"], TERMS), terms, step=TERMS, index="terms")

    f.arguments["row_floats"] = f.op("i64", f"lshr i64 {f['row_bytes'].text}, 2", "row_floats")
    f.loop(f["columns"], block, step=f.lanes, index="block")
