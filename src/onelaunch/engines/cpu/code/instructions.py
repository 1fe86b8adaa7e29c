"""Instructions of LLVM IR as text: typed values, named results.

Integers may be Python ints or `Value`s of type i64. Arithmetic on two ints is done in Python, so that constant sizes give
constant addresses. Results are named after their content (`%row.7`, `%bias.3`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from onelaunch.engines.cpu.plan.target import Target


@dataclass(frozen=True, slots=True)
class Value:
    type: str
    text: str


Int = int | Value


def float_text(number: float) -> str:
    """A float in LLVM's notation: the hexadecimal bits of the double of the same value."""
    single = struct.unpack("f", struct.pack("f", number))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', single))[0]:016X}"


def int_text(number: Int) -> str:
    return str(number) if isinstance(number, int) else number.text


class Instructions:
    """Emits instructions in order; the LLVM intrinsics they call are added to `declarations`."""

    def __init__(self, target: Target, declarations: dict[str, None]) -> None:
        self.target, self.declarations = target, declarations
        self.lanes = target.lanes
        self.vector = f"<{self.lanes} x float>"
        self.integers = f"<{self.lanes} x i32>"
        self.lines: list[str] = []
        self.count = 0

    def _fresh(self, hint: str) -> str:
        self.count += 1
        return f"{hint}.{self.count}"

    def emit(self, line: str) -> None:
        self.lines.append("  " + line)

    def op(self, type_: str, instruction: str, hint: str = "v") -> Value:
        name = "%" + self._fresh(hint)
        self.emit(f"{name} = {instruction}")
        return Value(type_, name)

    def binary(self, opcode: str, a: Value, b: Value, hint: str = "v") -> Value:
        return self.op(a.type, f"{opcode} {a.type} {a.text}, {b.text}", hint)

    def intrinsic(self, type_: str, name: str, *arguments: Value, hint: str = "v") -> Value:
        """A call of the LLVM intrinsic `llvm.<name>`."""
        types = ", ".join(argument.type for argument in arguments)
        self.declarations[f"declare {type_} @llvm.{name}({types})"] = None
        text = ", ".join(f"{argument.type} {argument.text}" for argument in arguments)
        if type_ == "void":
            self.emit(f"call void @llvm.{name}({text})")
            return Value("void", "")
        return self.op(type_, f"call {type_} @llvm.{name}({text})", hint)

    def call(self, name: str, *arguments: Int) -> None:
        values = [Value("i64", str(item)) if isinstance(item, int) else item for item in arguments]
        self.emit(f"call void @{name}({', '.join(f'{value.type} {value.text}' for value in values)})")

    def add(self, a: Int, b: Int, hint: str = "sum") -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if isinstance(a, int) and a == 0:
            return b
        if isinstance(b, int) and b == 0:
            return a
        return self.op("i64", f"add i64 {int_text(a)}, {int_text(b)}", hint)

    def sub(self, a: Int, b: Int, hint: str = "difference") -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if isinstance(b, int) and b == 0 else self.op("i64", f"sub i64 {int_text(a)}, {int_text(b)}", hint)

    def mul(self, a: Int, b: Int, hint: str = "product") -> Int:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        for constant, other in ((a, b), (b, a)):
            if isinstance(constant, int) and constant in (0, 1):
                return other if constant else 0
        return self.op("i64", f"mul i64 {int_text(a)}, {int_text(b)}", hint)

    def minimum(self, a: Int, b: Int, hint: str = "minimum") -> Value:
        return self.intrinsic("i64", "smin.i64", self.i64(a), self.i64(b), hint=hint)

    def i64(self, number: Int) -> Value:
        return Value("i64", str(number)) if isinstance(number, int) else number

    def at(self, pointer: Value, index: Int, element: str = "float", hint: str = "at") -> Value:
        """The address of `pointer[index]`."""
        if isinstance(index, int) and index == 0:
            return pointer
        return self.op("ptr", f"getelementptr {element}, ptr {pointer.text}, i64 {int_text(index)}", hint)

    def opaque(self, pointer: Value, hint: str) -> Value:
        """The same address. LLVM does not know what it is computed from, and so keeps it in a register of its own."""
        return self.op("ptr", f'call ptr asm "", "=r,0"(ptr {pointer.text})', hint)

    def opaque_vector(self, value: Value) -> Value:
        """The same vector. LLVM does not know what it is computed from."""
        constraint = self.target.vector_constraint
        if not constraint:
            return value
        return self.op(value.type, f'call {value.type} asm "", "={constraint},0"({value.type} {value.text})', "opaque")

    def rows(self, first: Value, stride: Value, count: int) -> list[Value]:
        """Addresses of `count` rows that are `stride` floats apart. Four at a time have one base, so that each address is the
        operand of one instruction; LLVM would compute every one from the stride."""
        found: list[Value] = []
        step = self.i64(self.mul(stride, 4))
        while len(found) < count:
            found += [self.at(first, self.mul(m, step), "i8", "row") for m in range(min(4, count - len(found)))]
            if len(found) < count:
                first = self.opaque(self.at(first, self.mul(4, step), "i8"), "fourth")
        return found

    def keep_order(self) -> None:
        """No load or store is moved across this point."""
        self.emit('call void asm sideeffect "", "~{memory}"()')

    def load(self, type_: str, pointer: Value, index: Int = 0, *, element: str = "float", hint: str = "v") -> Value:
        align = {"i64": 8, "double": 8, "ptr": 8, "i8": 1}.get(type_, {"i8": 1, "i16": 2}.get(element, 4))
        address = self.at(pointer, index, element)
        return self.op(type_, f"load {type_}, ptr {address.text}, align {align}", hint)

    def store(self, value: Value, pointer: Value, index: Int = 0, *, element: str = "float") -> None:
        align = {"i64": 8, "double": 8, "ptr": 8}.get(value.type, {"i8": 1, "i16": 2}.get(element, 4))
        address = self.at(pointer, index, element)
        self.emit(f"store {value.type} {value.text}, ptr {address.text}, align {align}")

    def vload(self, pointer: Value, index: Int = 0, hint: str = "v") -> Value:
        return self.load(self.vector, pointer, index, hint=hint)

    def vload_where(self, mask: Value, pointer: Value, type_: str = "float", hint: str = "part") -> Value:
        """The lanes of `mask`, the rest zero; memory of the others is not read."""
        vector = f"<{self.lanes} x {type_}>"
        suffix = {"float": "f32", "i8": "i8", "i32": "i32"}[type_]
        zero = Value(vector, "zeroinitializer")
        name = f"masked.load.v{self.lanes}{suffix}.p0"
        self.declarations[f"declare {vector} @llvm.{name}(ptr, i32, {mask.type}, {vector})"] = None
        align = 1 if type_ == "i8" else 4
        return self.op(
            vector,
            f"call {vector} @llvm.{name}(ptr {pointer.text}, i32 {align}, {mask.type} {mask.text}, {vector} {zero.text})",
            hint,
        )

    def prefetch(self, pointer: Value, index: Int = 0, *, write: bool = False, locality: int = 3) -> None:
        address = self.at(pointer, index)
        self.declarations["declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"] = None
        self.emit(f"call void @llvm.prefetch.p0(ptr {address.text}, i32 {int(write)}, i32 {locality}, i32 1)")

    @staticmethod
    def _list(element: str, items: Sequence[object]) -> str:
        return "<" + ", ".join(f"{element} {item}" for item in items) + ">"

    def _splat_text(self, element: str, text: str) -> str:
        return f"splat ({element} {text})" if self.target.splats else self._list(element, [text] * self.lanes)

    def constant(self, number: float) -> Value:
        return Value(self.vector, self._splat_text("float", float_text(number)))

    def integer(self, number: int) -> Value:
        return Value(self.integers, self._splat_text("i32", str(number)))

    @property
    def zero(self) -> Value:
        return Value(self.vector, "zeroinitializer")

    def scalar(self, number: float) -> Value:
        return Value("float", float_text(number))

    def splat(self, value: Value, hint: str = "all") -> Value:
        vector = f"<{self.lanes} x {value.type}>"
        first = self.op(vector, f"insertelement {vector} poison, {value.type} {value.text}, i32 0", hint)
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        return self.op(vector, f"shufflevector {vector} {first.text}, {vector} poison, {zeros}", hint)

    def lane(self, value: Value, number: int, hint: str = "lane") -> Value:
        """One lane of a vector of floats in all lanes."""
        mask = self.integer(number)
        vectors = f"{value.type} {value.text}, {value.type} poison"
        return self.op(value.type, f"shufflevector {vectors}, {mask.type} {mask.text}", hint)

    def first(self, value: Value, hint: str = "first") -> Value:
        """Lane 0 of a vector of floats."""
        return self.op("float", f"extractelement {self.vector} {value.text}, i32 0", hint)

    def lane_numbers(self) -> Value:
        return Value(self.integers, self._list("i32", range(self.lanes)))

    def fadd(self, a: Value, b: Value, hint: str = "v") -> Value:
        return self.binary("fadd", a, b, hint)

    def fsub(self, a: Value, b: Value, hint: str = "v") -> Value:
        return self.binary("fsub", a, b, hint)

    def fmul(self, a: Value, b: Value, hint: str = "v") -> Value:
        return self.binary("fmul", a, b, hint)

    def fdiv(self, a: Value, b: Value, hint: str = "v") -> Value:
        return self.binary("fdiv", a, b, hint)

    def fma(self, a: Value, b: Value, c: Value, hint: str = "v") -> Value:
        """a * b + c, with one rounding where the machine has FMA: unlike `fma`, fmuladd never calls the C library."""
        suffix = "f32" if a.type == "float" else "f64" if a.type == "double" else f"v{self.lanes}f32"
        return self.intrinsic(a.type, f"fmuladd.{suffix}", a, b, c, hint=hint)

    def compare(self, condition: str, a: Value, b: Value, hint: str = "is") -> Value:
        """fcmp for floats ("ogt", "uno", ...), icmp for integers ("eq", "slt", ...)."""
        floats = "float" in a.type or a.type == "double"
        lanes = a.type.startswith("<")
        type_ = f"<{self.lanes} x i1>" if lanes else "i1"
        return self.op(type_, f"{'fcmp' if floats else 'icmp'} {condition} {a.type} {a.text}, {b.text}", hint)

    def select(self, condition: Value, a: Value, b: Value, hint: str = "v") -> Value:
        return self.op(a.type, f"select {condition.type} {condition.text}, {a.type} {a.text}, {b.type} {b.text}", hint)

    def at_least(self, x: Value, floor: Value, hint: str = "v") -> Value:
        """max(x, floor) that keeps a NaN in x (one instruction on x86; `llvm.maxnum` would hide the NaN)."""
        return self.select(self.compare("ogt", floor, x), floor, x, hint)

    def at_most(self, x: Value, ceiling: Value, hint: str = "v") -> Value:
        return self.select(self.compare("olt", ceiling, x), ceiling, x, hint)

    def lanes_below(self, count: Int, hint: str = "mask") -> Value:
        """The mask of the first `count` lanes."""
        number = self.op("i32", f"trunc i64 {self.i64(count).text} to i32", hint)
        return self.compare("slt", self.lane_numbers(), self.splat(number, hint), hint)

    def reduce(self, operation: str, value: Value, hint: str = "total") -> Value:
        """Sum ("add") or maximum ("max") over lanes, as a tree of fixed shape."""
        width = self.lanes
        while width > 1:
            width //= 2
            order = [*range(width, 2 * width), *([-1] * (self.lanes - width))]
            indices = self._list("i32", ["poison" if lane < 0 else lane for lane in order])
            other = self.op(
                self.vector,
                f"shufflevector {self.vector} {value.text}, {self.vector} poison, <{self.lanes} x i32> {indices}",
                hint,
            )
            value = self.fadd(value, other, hint) if operation == "add" else self.at_least(value, other, hint)
        return self.op("float", f"extractelement {self.vector} {value.text}, i32 0", hint)
