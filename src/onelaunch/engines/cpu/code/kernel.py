"""Kernels, and the commands that call them.

A *kernel* is a native function whose sizes, addresses and constants are read at run time from its *fields*, so that one
compilation serves every network. A *command* is a kernel with the values of its fields; a program is a list of commands.
A *unit* is what is compiled and cached together: the kernels of one file, shaped by a few options (the optimizer, the
activation), never by a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

# What the driver computes per step, eight bytes each. `rows` is the number of rows in the batch, `next_rows` that of the
# next batch (0 after the last step of a native call), `order` points at the batch's row numbers.
STEP = {
    "j": "i64", "step": "i64", "first_row": "i64", "rows": "i64", "next_rows": "i64", "order": "ptr", "scalars": "ptr",
}  # fmt: skip


@dataclass(frozen=True)
class Unit:
    """A key of `units.UNITS` and the options that shape its code."""

    name: str
    options: tuple[object, ...] = ()


class Address(NamedTuple):
    """A position in a buffer of the plan, or in memory outside the arena that the session names."""

    buffer: str
    offset: int = 0  # bytes

    def __add__(self, floats: int) -> Address:  # type: ignore[override]
        return Address(self.buffer, self.offset + 4 * floats)


FieldValue = int | float | Address | tuple[Address, ...]


class Kernel:
    """A native function `name(fields, step)`: the names and types of its fields, and the values of the step it reads."""

    def __init__(self, name: str, fields: str, step: str = "") -> None:
        """`fields`: such as "ptr source, i64 rows, float floor"; a `list` field points at addresses. `step`: keys of STEP."""
        self.name = name
        self.fields: dict[str, str] = {}
        for field in filter(None, (part.strip() for part in fields.split(","))):
            type_, variable = field.split()
            self.fields[variable] = type_
        self.has_lists = "list" in self.fields.values()
        self.step = tuple(step.replace(",", " ").split())

    def position(self, field: str) -> int:
        return list(self.fields).index(field)

    def command(self, unit: Unit, **values: FieldValue) -> Command:
        """A call of this kernel; every field needs a value."""
        assert values.keys() == self.fields.keys(), (self.name, values.keys() ^ self.fields.keys())
        return Command(unit, self, values)


class Command(NamedTuple):
    unit: Unit
    kernel: Kernel
    values: Mapping[str, FieldValue]
