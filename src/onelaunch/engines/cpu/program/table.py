"""A program in memory, as the driver reads it: lists of (kernel, fields), with every address filled in.

`Template` has what all sessions of a program share: the words, and which of them are relative to some address. `Table` is a
copy of them for one session.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.kernel import Address, Command, FieldValue, Kernel, Unit
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import CACHE_LINE

WORD = 8  # bytes per field
LINE = CACHE_LINE // WORD
TABLE, ARENA = "table", "arena"
Base = str | tuple[Unit, Kernel]  # TABLE, ARENA, a name of the session's (x, rows, seed, ...), or a kernel


class Template:
    """`words`: int64, each an absolute number or relative to a base. `positions`: the relative words of each base.
    `entries`: the bytes from the table's start to the driver's fields for each entry point.

    The fields of a command, and every list, begin at a cache line.
    """

    def __init__(self, lists: Mapping[str, tuple[list[Command], list[Command]]], plan: Plan) -> None:
        self._plan = plan
        self._words: list[int] = []
        self._positions: defaultdict[Base, list[int]] = defaultdict(list)
        self._written: dict[int, Address] = {}  # by id of the command: entry points share commands
        self.entries = {name: self._entry(name, *each).offset for name, each in lists.items()}
        self.words = np.array(self._words, np.int64)
        self.positions = {base: np.array(found) for base, found in self._positions.items()}

    def _entry(self, name: str, before: list[Command], commands: list[Command]) -> Address:
        kind = name.split(".")[0]
        settings = self._plan.settings
        training = kind == "train"
        return self._fields(driver.RUN.command(
            driver.UNIT, before=self._list(before), commands=self._list(commands), call=Address(f"call.{kind}"),
            all_rows=Address("rows" if training else "validation_rows"),
            batch=settings.batch if training else settings.validation_batch, order=Address("order"),
            scalars=Address("scalars"),
        ))  # fmt: skip

    def _list(self, commands: list[Command]) -> Address:
        pairs: list[FieldValue | Command] = []
        for command in commands:
            if id(command) not in self._written:
                self._written[id(command)] = self._fields(command)
            pairs += [command, self._written[id(command)]]
        return self._write([*pairs, 0, 0])

    def _fields(self, command: Command) -> Address:
        values = [command.values[name] for name in command.kernel.fields]
        if command.kernel.has_lists:
            values = [self._list_of(value) for value in values]
        return self._write(values)

    def _list_of(self, value: FieldValue) -> FieldValue:
        """A list is stored on its own; its place stands for it."""
        return self._write(value) if isinstance(value, tuple) and not isinstance(value, Address) else value

    def _write(self, values: Iterable[FieldValue | Command]) -> Address:
        """Store values at the next cache line and return where that is. A command stands for its kernel's address."""
        words, buffers, positions = self._words, self._plan.buffers, self._positions
        start = len(words)
        for value in values:
            if isinstance(value, int):
                words.append(value)
            elif isinstance(value, Address):
                buffer = buffers.get(value.buffer)
                positions[ARENA if buffer else value.buffer].append(len(words))
                words.append(value.offset + (buffer.offset if buffer else 0))
            elif isinstance(value, Command):
                positions[value.unit, value.kernel].append(len(words))
                words.append(0)
            else:
                words.append(struct.unpack("<i", struct.pack("<f", value))[0])
        words += [0] * (-len(words) % LINE)
        return Address(TABLE, WORD * start)


class Table:
    """`entries` has the address of the driver's fields for each entry point. Keep the table as long as they are used."""

    def __init__(
        self, template: Template, function: Callable[[Unit, Kernel], int], arena: int, outside: Mapping[str, int]
    ) -> None:
        """`function`: the address of a kernel. `arena`: that of the arena. `outside`: addresses and numbers that commands name
        and the arena does not have: x, y, order, rows, seed, and those of the validation data."""
        self._template = template
        memory = np.empty(len(template.words) + LINE, np.int64)
        start = -memory.ctypes.data % CACHE_LINE // WORD
        self._words = memory[start : start + len(template.words)]
        self._words[:] = template.words
        address = int(self._words.ctypes.data)
        self.entries = {name: address + offset for name, offset in template.entries.items()}
        self._add({TABLE: address, ARENA: arena})
        self._add({base: function(*base) for base in template.positions if isinstance(base, tuple)})
        self.bind(outside)

    def bind(self, outside: Mapping[str, int]) -> None:
        """Set the addresses and numbers that are outside the arena. Entry points keep their addresses."""
        names = [base for base in self._template.positions if isinstance(base, str) and base not in (TABLE, ARENA)]
        self._add({name: outside[name] for name in names})

    def _add(self, bases: Mapping[Base, int]) -> None:
        for base, value in bases.items():
            positions = self._template.positions[base]
            self._words[positions] = self._template.words[positions] + value
