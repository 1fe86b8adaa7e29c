"""The run's random numbers in native code, bit for bit those of `onelaunch.rng`.

The kernel `draw_bits` fills a region with dropout bits, one Philox call per lane; `row_order` writes an epoch's permutation.
"""

from __future__ import annotations

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.rng import (
    FEISTEL_MULTIPLIERS,
    FEISTEL_ROUNDS,
    PERMUTATION_STREAM,
    PHILOX_KEY_STEPS,
    PHILOX_MULTIPLIERS,
    UNITS_PER_CALL,
)

DRAW_BITS = Kernel(
    "draw_bits", "ptr bits, i64 seed, i64 layer, i64 calls, i64 groups, i64 first_row, i64 first_group", "step"
)


def signed(word: int) -> int:
    """A 32-bit word in LLVM's notation."""
    return word - 2**32 if word >= 2**31 else word


def philox(f: Function, counter: list[Value], key: tuple[Value, Value]) -> list[Value]:
    """Four vectors of 32-bit words, one Philox4x32-10 call per lane."""
    wide = f"<{f.lanes} x i64>"
    multipliers = [f.splat(Value("i64", str(number)), "multiplier") for number in PHILOX_MULTIPLIERS]
    thirty_two = f.splat(Value("i64", "32"), "bits")

    def multiply(word: Value, multiplier: Value) -> tuple[Value, Value]:
        extended = f.op(wide, f"zext {f.integers} {word.text} to {wide}", "wide")
        product = f.binary("mul", extended, multiplier, "product")
        high = f.binary("lshr", product, thirty_two, "high")
        high = f.op(f.integers, f"trunc {wide} {high.text} to {f.integers}", "high")
        return high, f.op(f.integers, f"trunc {wide} {product.text} to {f.integers}", "low")

    def one_round(_: Int, c0: Value, c1: Value, c2: Value, c3: Value, key0: Value, key1: Value) -> list[Value]:
        high0, low0 = multiply(c0, multipliers[0])
        high1, low1 = multiply(c2, multipliers[1])
        first = f.binary("xor", f.binary("xor", high1, c1), key0, "word")
        third = f.binary("xor", f.binary("xor", high0, c3), key1, "word")
        key0 = f.binary("add", key0, f.integer(signed(PHILOX_KEY_STEPS[0])), "key")
        key1 = f.binary("add", key1, f.integer(signed(PHILOX_KEY_STEPS[1])), "key")
        return [first, low1, third, low0, key0, key1]

    return f.loop(10, one_round, carry=[*counter, *key], index="round")[:4]


def _low_and_high(f: Function, word: Value, hint: str) -> tuple[Value, Value]:
    """The low and the high 32 bits of an i64, each in all lanes."""
    low = f.op("i32", f"trunc i64 {word.text} to i32", hint)
    shifted = f.op("i64", f"lshr i64 {word.text}, 32", hint)
    high = f.op("i32", f"trunc i64 {shifted.text} to i32", hint)
    return f.splat(low, hint), f.splat(high, hint)


def emit_dropout(module: Module) -> None:
    module.kernel(DRAW_BITS, _draw_bits)


def _draw_bits(f: Function) -> None:
    """Write the 16-bit values of a region, `columns` per row, where a row has `groups` Philox calls.

    The calls of a region are numbered row by row and computed `lanes` at a time. The last vector may write values that
    are never read (`Plan.drawn_bits` leaves room for them).
    """
    key = _low_and_high(f, f["seed"], "key")

    def word(name: str) -> Value:
        return f.splat(f.op("i32", f"trunc i64 {f[name].text} to i32", name), name)

    step, layer, groups, first_row, first_group = map(word, ("step", "layer", "groups", "first_row", "first_group"))

    def body(first: Int) -> None:
        start = f.op("i32", f"trunc i64 {f.i64(first).text} to i32", "call")
        call = f.binary("add", f.splat(start, "call"), f.lane_numbers(), "call")
        row = _quotient(f, call, groups)
        group = f.binary("sub", call, f.binary("mul", row, groups), "group")
        row, group = f.binary("add", row, first_row, "row"), f.binary("add", group, first_group, "group")
        words = philox(f, [group, row, step, layer], key)
        _store_interleaved(f, words, f.at(f["bits"], f.mul(first, UNITS_PER_CALL), "i16", "bits"))

    f.loop(f["calls"], body, step=f.lanes, index="call")


def _quotient(f: Function, a: Value, b: Value) -> Value:
    """a // b, for a quotient below 2**22: in floats, then corrected by one where the rounding went up or down."""
    dividend, divisor = (f.op(f.vector, f"uitofp {f.integers} {v.text} to {f.vector}", "float") for v in (a, b))
    guess = f.op(f.integers, f"fptoui {f.vector} {f.fdiv(dividend, divisor).text} to {f.integers}", "guess")
    rest = f.binary("sub", a, f.binary("mul", guess, b), "rest")
    too_high = f.compare("slt", rest, f.integer(0), "too_high")
    too_low = f.compare("sge", rest, b, "too_low")
    guess = f.select(too_high, f.binary("sub", guess, f.integer(1)), guess)
    return f.select(too_low, f.binary("add", guess, f.integer(1)), guess, "quotient")


def _store_interleaved(f: Function, words: list[Value], pointer: Value) -> None:
    """Store words[0][0], words[1][0], words[2][0], words[3][0], words[0][1], ...: the four words of a call are adjacent."""
    double, quadruple = f"<{2 * f.lanes} x i32>", f"<{4 * f.lanes} x i32>"

    def join(type_: str, result: str, a: Value, b: Value, lanes: int) -> Value:
        order = ", ".join(f"i32 {lane}" for lane in range(2 * lanes))
        return f.op(
            result, f"shufflevector {type_} {a.text}, {type_} {b.text}, <{2 * lanes} x i32> <{order}>", "joined"
        )

    first = join(f.integers, double, words[0], words[1], f.lanes)
    second = join(f.integers, double, words[2], words[3], f.lanes)
    both = join(double, quadruple, first, second, 2 * f.lanes)
    order = ", ".join(f"i32 {word * f.lanes + lane}" for lane in range(f.lanes) for word in range(4))
    mixed = f.op(
        quadruple,
        f"shufflevector {quadruple} {both.text}, {quadruple} poison, <{4 * f.lanes} x i32> <{order}>",
        "mixed",
    )
    f.emit(f"store {quadruple} {mixed.text}, ptr {pointer.text}, align 2")


def _round_keys(f: Function) -> list[Value]:
    """The eight Feistel keys of an epoch, each in all lanes; they come from Philox call 0 (lane 0) and call 1 (lane 1)."""
    low, high = _low_and_high(f, f["epoch"], "epoch")
    words = philox(
        f, [f.lane_numbers(), low, high, f.integer(signed(PERMUTATION_STREAM))], _low_and_high(f, f["seed"], "seed")
    )
    keys = []
    for number in range(FEISTEL_ROUNDS):
        call, word = divmod(number, 4)
        key = f.op("i32", f"extractelement {f.integers} {words[word].text}, i32 {call}", "key")
        keys.append(f.splat(key, "key"))
    return keys


def row_order(module: Module) -> str:
    """A public function `(order, rows, bits, seed, epoch)`: `order[i] = permutation(rows, seed, epoch)[i]` as i32.

    `bits` is `rng.permutation_bits(rows)`; `order` has room for whole vectors.
    """

    def make(f: Function) -> None:
        total = f.op("i32", f"trunc i64 {f['rows'].text} to i32", "rows")
        limit = f.splat(total, "limit")
        width = f.op("i32", f"trunc i64 {f['bits'].text} to i32", "width")
        left_width = f.op("i32", f"lshr i32 {width.text}, 1", "left")
        right_width = f.op("i32", f"sub i32 {width.text}, {left_width.text}", "right")
        widths = [f.splat(left_width, "left_bits"), f.splat(right_width, "right_bits")]
        one = f.integer(1)
        masks = [f.binary("sub", f.binary("shl", one, bits), one, "mask") for bits in widths]
        keys = _round_keys(f)

        def feistel(index: Value) -> Value:
            left = f.binary("lshr", index, widths[1], "left")
            right = f.binary("and", index, masks[1], "right")
            for number, key in enumerate(keys):
                mixed = f.binary("mul", f.binary("xor", right, key), f.integer(signed(FEISTEL_MULTIPLIERS[0])))
                mixed = f.binary("xor", mixed, f.binary("lshr", mixed, f.integer(13)))
                mixed = f.binary("mul", mixed, f.integer(signed(FEISTEL_MULTIPLIERS[1])))
                mixed = f.binary("xor", mixed, f.binary("lshr", mixed, f.integer(16)))
                mixed = f.binary("and", mixed, masks[number % 2], "mixed")
                left, right = right, f.binary("xor", left, mixed, "right")
            # After an even number of rounds, left and right have their initial widths again.
            return f.binary("or", f.binary("shl", left, widths[1]), right, "walked")

        def body(first: Int) -> None:
            start = f.op("i32", f"trunc i64 {f.i64(first).text} to i32", "first")
            index = f.binary("add", f.splat(start, "index"), f.lane_numbers(), "index")
            # Lanes past the end repeat row 0: their cycle walk ends like any other.
            index = f.select(f.compare("ult", index, limit), index, Value(f.integers, "zeroinitializer"))
            address = f.at(f["order"], first, "i32", "address")
            f.store(feistel(index), address)

            def outside(_: Value) -> Value:
                current = f.load(f.integers, address, hint="current")
                beyond = f.compare("uge", current, limit, "beyond")
                return f.intrinsic("i1", f"vector.reduce.or.v{f.lanes}i1", beyond, hint="outside")

            def walk_on(_: Value) -> None:
                current = f.load(f.integers, address, hint="current")
                beyond = f.compare("uge", current, limit, "beyond")
                f.store(f.select(beyond, feistel(current), current), address)

            f.repeat_while(outside, walk_on)

        f.loop(f["rows"], body, step=f.lanes, index="row")

    return module.function("row_order", "ptr %order, i64 %rows, i64 %bits, i64 %seed, i64 %epoch", make, public=True)
