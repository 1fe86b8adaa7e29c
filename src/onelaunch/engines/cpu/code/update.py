"""dW with the optimizer's update as its epilogue, and the bias. Weight gradients never reach memory.

dW   a: activations, one row of the batch per term   b: panels of the gradient   c: panels of the weights
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.optimizer import Update, UpdateRule
from onelaunch.engines.cpu.code.product import by_parity
from onelaunch.engines.cpu.code.tile import TILE_FIELDS, TILES, accumulate, epilogue, over_heights, over_tiles
from onelaunch.engines.cpu.plan.target import CACHE_LINE

# The rows of the next batch are prefetched between the tiles: in random order they miss every cache. A row has `pieces` pieces
# of `lines` cache lines; each tile prefetches `times` of them (0: none), from row `first_next` of the next batch on.
NEXT_ROWS = "ptr x, i64 row_bytes, i64 lines, i64 pieces, i64 times, i64 batch, i64 first_next"
FIELDS = (
    "ptr a, ptr odd_a, ptr b, ptr c, i64 b_panel, i64 c_panel, i64 a_step, i64 length, i64 state_stride, ptr hyper, "
    f"{TILE_FIELDS}, "
    # 1 to prefetch what a tile will write (weights and states, or the gradient) before the product, 0 where it is near anyway.
    f"i64 far, {NEXT_ROWS}"
)
WEIGHT_UPDATES = {
    vectors: Kernel(f"weight_update_{vectors}", FIELDS, "j order next_rows scalars") for vectors in (1, 2)
}
BIAS_UPDATES = {
    vectors: Kernel(
        f"bias_update_{vectors}",
        "ptr gradient, ptr bias, i64 panels, i64 gradient_panel, i64 length, i64 state_stride, ptr hyper",
        "scalars",
    )
    for vectors in (1, 2)
}


def emit(module: Module, rule: UpdateRule) -> None:
    for vectors in (1, 2):
        module.kernel(WEIGHT_UPDATES[vectors], lambda f, v=vectors: _weight_update(f, v, rule))  # type: ignore[misc]
        module.kernel(BIAS_UPDATES[vectors], lambda f, v=vectors: _bias_update(f, v, rule))  # type: ignore[misc]


def _weight_update(f: Function, vectors: int, rule: UpdateRule) -> None:
    a = by_parity(f, f["a"], f["odd_a"])
    position = first_position(f)
    over_heights(
        f, f.target.update_heights(vectors),
        lambda height, tiles: f.call(_tiles(f.module, height, vectors, rule), a, position, f["fields"], f["step"], *tiles),
    )  # fmt: skip


def _tiles(module: Module, rows: int, vectors: int, rule: UpdateRule) -> str:
    """Tiles of one height, in all panels."""
    kernel = WEIGHT_UPDATES[vectors]

    def make(f: Function) -> None:
        f.load_fields(
            kernel, "b", "c", "b_panel", "c_panel", "panels", "a_step", "length", "state_stride", "hyper", "far"
        )
        f.load_fields(kernel, "x", "row_bytes", "lines", "pieces", "times", "batch")
        f.load_step("order", "next_rows", "scalars")
        width = vectors * f.lanes
        spare = f.op("ptr", f"alloca [{rows * width} x float], align 64", "spare")
        next_rows = NextRows(f)
        update = Update(f, rule, f["scalars"], f["hyper"])
        zeros, step = [f.zero] * (rows * vectors), f.i64(f.mul(f["a_step"], 4))
        prefetched = f.i64(f.mul(f["far"], rows * width))

        def inputs(first: Sequence[Value]) -> list[Value]:
            return [f.at(first[0], m) for m in range(rows)]

        # All panels per tile of inputs: a tile's columns of the activations lie a row apart and stay in L1, while panels of
        # the gradient are read in order. The other way round took 5 to 9 % longer (batch 32 and 128).
        def tile(first: Value, valid: Value) -> None:
            a_at, place = f.at(f["a"], first), f.mul(first, width)

            def panel(number: Int) -> None:
                next_rows.prefetch_pieces()
                b = f.at(f["b"], f.mul(number, f["b_panel"]), hint="b")
                c = f.at(f["c"], f.add(f.mul(number, f["c_panel"]), place), hint="c")
                copies = update.copies(c, f["state_stride"])

                def prefetch(position: Int) -> None:
                    for copy in copies[-1:] if rule.stores else copies:
                        f.prefetch(copy, position, write=True)

                f.loop(prefetched, prefetch, step=CACHE_LINE // 4, index="line")
                carried = accumulate(f, vectors, f["length"], b, zeros, [a_at], step, inputs, adjacent_rows=True)

                if not rule.is_short:
                    for n, value in enumerate(carried):
                        f.store(value, spare, n * f.lanes)
                    f.call(_update_rows(module, vectors, rule), spare, c, valid, f["fields"], f["scalars"])
                    return

                def row(m: Int, values: Sequence[Value]) -> None:
                    for v, value in enumerate(values):
                        update.apply(value, copies, f.add(f.mul(m, width), v * f.lanes))

                epilogue(f, carried, vectors, valid, spare, row)

            f.loop(f["panels"], panel, index="panel")

        over_tiles(f, rows, tile)

    return module.function(
        f"weight_update_tiles_{rows}x{vectors}", f"ptr %a, ptr %position, ptr %fields, ptr %step, {TILES}", make
    )


def _update_rows(module: Module, vectors: int, rule: UpdateRule) -> str:
    """A longer update, as a loop over the rows of a tile: compiled once, and its time covers that of the store and the load."""

    def make(f: Function) -> None:
        f.load_fields(WEIGHT_UPDATES[vectors], "state_stride", "hyper")
        update = Update(f, rule, f["scalars"], f["hyper"])
        copies = update.copies(f["c"], f["state_stride"])

        def vector(index: Int) -> None:
            for v in range(vectors):
                at = f.add(index, v * f.lanes)
                update.apply(f.vload(f["gradient"], at), copies, at)

        f.loop(f.mul(f["valid"], vectors * f.lanes), vector, step=vectors * f.lanes, index="row")

    return module.function(
        f"update_rows_{vectors}", "ptr %gradient, ptr %c, i64 %valid, ptr %fields, ptr %scalars", make
    )


def first_position(f: Function) -> Value:
    """Memory for the argument `position` of NextRows."""
    position = f.op("ptr", "alloca [2 x i64], align 8", "position")
    for number, value in enumerate((f["first_next"], f.i64(0))):
        f.store(value, position, number, element="i64")
    return position


class NextRows:
    """Prefetches the next batch's rows, one piece of a row per call. The argument `position` points at the next piece: its row,
    and its number in the row."""

    def __init__(self, f: Function) -> None:
        self.f = f
        self.row, self.piece = f["position"], f.at(f["position"], 1, "i64", "piece")
        self.order = f.at(f["order"], f["batch"], "i32", "next_order")
        self.piece_bytes = f.i64(f.mul(f["lines"], CACHE_LINE))

    def prefetch_pieces(self) -> None:
        """Prefetch the field `times` of pieces."""
        self.f.loop(self.f["times"], lambda _: self._prefetch_piece(), index="piece")

    def _prefetch_piece(self) -> None:
        f = self.f
        row = f.load("i64", self.row, hint="row")

        def prefetch() -> None:
            piece = f.load("i64", self.piece, hint="piece")
            number = f.load("i32", self.order, row, element="i32", hint="sample")
            sample = f.op("i64", f"zext i32 {number.text} to i64", "sample")
            offset = f.add(f.mul(sample, f["row_bytes"]), f.mul(piece, self.piece_bytes))
            start = f.at(f["x"], offset, "i8", "start")
            f.loop(f["lines"], lambda line: f.prefetch(start, f.mul(line, CACHE_LINE // 4), locality=2), index="line")
            following = f.i64(f.add(piece, 1))
            at_end = f.compare("eq", following, f["pieces"], "at_end")
            f.store(f.select(at_end, f.i64(0), following), self.piece)
            f.store(f.i64(f.add(row, f.op("i64", f"zext i1 {at_end.text} to i64"))), self.row)

        f.when(f.compare("slt", row, f["next_rows"]), prefetch)


def _bias_update(f: Function, vectors: int, rule: UpdateRule) -> None:
    """Sum the gradient over the batch and update the bias."""
    width, lines = vectors * f.lanes, 4  # independent sums, to hide the latency of the addition
    update = Update(f, rule, f["scalars"], f["hyper"])
    whole = f.op("i64", f"and i64 {f['length'].text}, {-lines}", "whole")

    def panel(number: Int) -> None:
        gradient = f.at(f["gradient"], f.mul(number, f["gradient_panel"]), hint="gradient")

        def add(row: Int, sums: Sequence[Value]) -> list[Value]:
            at = f.at(gradient, f.mul(row, width))
            return [f.fadd(total, f.vload(at, n * f.lanes)) for n, total in enumerate(sums)]

        zeros = [f.zero] * (lines * vectors)
        sums = f.loop(whole, lambda row, *s: add(row, s), step=lines, carry=zeros, index="row")
        # The rows left over are added to the first sums, one each.
        left = f.sub(f["length"], whole)
        for line in range(lines - 1):
            exists = f.compare("slt", f.i64(line), f.i64(left), "exists")
            at = f.at(gradient, f.mul(f.add(whole, line), width))
            for v in range(vectors):
                n = line * vectors + v
                sums[n] = f.select(exists, f.fadd(sums[n], f.vload(at, v * f.lanes)), sums[n])
        copies = update.copies(f.at(f["bias"], f.mul(number, width)), f["state_stride"])
        for v in range(vectors):
            first, second, third, fourth = sums[v::vectors]
            update.apply(f.fadd(f.fadd(first, second), f.fadd(third, fourth)), copies, v * f.lanes)

    f.loop(f["panels"], panel, index="panel")
