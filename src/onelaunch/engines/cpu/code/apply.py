"""A residual addition and the elementwise operations of a group, over columns of activations.

A panel that a product has just written is in L1.
"""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.code.elementwise import Group, Operations
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.code.kernel import Kernel
from onelaunch.engines.cpu.code.product import by_parity


def bits_fields(group: Group) -> str:
    """Fields of the random bits `[row][bits_pitch]` of every Dropout in a group."""
    return ", i64 bits_pitch" + "".join(f", ptr bits{number}" for number in range(len(group.dropouts)))


def load_bits(f: Function, group: Group, row: Int, column: Int) -> list[Value]:
    """The dropout bits of one vector, for each Dropout of a group."""
    index = f.add(f.mul(row, f["bits_pitch"]), column)
    pointers = [f[f"bits{number}"] for number in range(len(group.dropouts))]
    return [f.load(f"<{f.lanes} x i16>", pointer, index, element="i16", hint="bits") for pointer in pointers]


def apply_kernel(group: Group) -> Kernel:
    operands = "ptr source, ptr odd_source, ptr added, ptr odd_added, ptr output, ptr derivative"
    operations = f", {group.fields}" if group.names else ""
    return Kernel("apply", f"{operands}, i64 rows, i64 columns, i64 pitch{operations}{bits_fields(group)}", "j")


def emit(module: Module, group: Group, draws: bool, stores: bool, adds: bool) -> None:
    """`draws`: dropout is active (training). `stores`: the derivative is stored too. `adds`: `added` is added first."""
    module.kernel(apply_kernel(group), lambda f: _apply(f, group, draws, stores, adds))


def _apply(f: Function, group: Group, draws: bool, stores: bool, adds: bool) -> None:
    source, added = by_parity(f, f["source"], f["odd_source"]), by_parity(f, f["added"], f["odd_added"])
    operations = Operations(f, group)

    def vector(row: Int, column: Int) -> None:
        position = f.add(f.mul(row, f["pitch"]), column)
        value = f.vload(source, position)
        if adds:
            value = f.fadd(value, f.vload(added, position), "sum")
        bits: Sequence[Value] = load_bits(f, group, row, column) if draws else ()
        operations.store_forward(value, bits, position, stores=stores)

    def row(number: Int) -> None:
        f.loop(f["columns"], lambda column: vector(number, column), step=f.lanes, index="column")

    f.loop(f["rows"], row, index="row")
