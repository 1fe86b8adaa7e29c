"""A program in memory, as the driver reads it: lists of (kernel, fields), with every address filled in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.kernel import Address, Command, FieldValue, Kernel, Unit
from onelaunch.engines.cpu.plan.target import CACHE_LINE
from onelaunch.engines.cpu.program.program import Program
from onelaunch.integers import round_up

WORD = 8  # bytes per field
LINE = CACHE_LINE // WORD


class Table:
    """`entries` has the address of the driver's fields for each entry point. Keep the table as long as they are used.

    The fields of a command, and every list, begin at a cache line.
    """

    def __init__(
        self, program: Program, function: Callable[[Unit, Kernel], int], arena: int, outside: Mapping[str, int]
    ) -> None:
        """`function`: the address of a kernel. `arena`: that of the arena. `outside`: addresses and numbers that commands name
        and the arena does not have: x, y, order, rows, seed, and those of the validation data."""
        self._function = function
        self._offsets = {name: arena + buffer.offset for name, buffer in program.plan.buffers.items()}
        self._written: dict[int, int] = {}  # by id of the command: entry points share commands
        commands = [command for lists in program.lists.values() for each in lists for command in each]
        distinct = {id(command): command for command in commands}.values()
        size = sum(round_up(len(command.values), LINE) for command in distinct)
        size += sum(
            round_up(len(value), LINE) for c in distinct for value in c.values.values() if isinstance(value, tuple)
        )
        size += sum(round_up(2 * len(each) + 2, LINE) for lists in program.lists.values() for each in lists)
        size += len(program.lists) * round_up(len(driver.RUN.fields), LINE) + LINE
        self._memory = np.zeros(size, np.int64)
        self._next = -self._memory.ctypes.data % CACHE_LINE // WORD
        self._outside_words: list[tuple[int, Address]] = []  # position of each word that `outside` determines
        self.entries = {name: self._entry(program, name, *lists) for name, lists in program.lists.items()}
        self.bind(outside)

    def bind(self, outside: Mapping[str, int]) -> None:
        """Set the addresses and numbers that are outside the arena. Entry points keep their addresses."""
        for position, address in self._outside_words:
            self._memory[position] = outside[address.buffer] + address.offset

    def _entry(self, program: Program, name: str, before: list[Command], commands: list[Command]) -> int:
        kind = name.split(".")[0]
        settings = program.plan.settings
        training = kind == "train"
        return self._fields(driver.RUN.command(
            driver.UNIT, before=self._list(before), commands=self._list(commands), call=Address(f"call.{kind}"),
            all_rows=Address("rows" if training else "validation_rows"),
            batch=settings.batch if training else settings.validation_batch, order=Address("order"),
            scalars=Address("scalars"),
        ))  # fmt: skip

    def _list(self, commands: list[Command]) -> int:
        words: list[int | Address] = []
        for command in commands:
            if id(command) not in self._written:
                self._written[id(command)] = self._fields(command)
            words += [self._function(command.unit, command.kernel), self._written[id(command)]]
        return self._write([*words, 0, 0])

    def _fields(self, command: Command) -> int:
        values = command.values
        return self._write([self._word(values[name], type_) for name, type_ in command.kernel.fields.items()])

    def _word(self, value: FieldValue, type_: str) -> int | Address:
        if type_ == "float":
            assert isinstance(value, float)
            return int(struct.unpack("<i", struct.pack("<f", value))[0])
        if type_ == "list":
            assert isinstance(value, tuple)
            return self._write([item for item in value if isinstance(item, Address)])
        return value if isinstance(value, Address) else int(value)  # type: ignore[arg-type]

    def _write(self, words: Sequence[int | Address]) -> int:
        """Store words at the next cache line and return their address."""
        start = self._next
        for position, word in enumerate(words, start):
            if not isinstance(word, Address):
                self._memory[position] = word
            elif (found := self._offsets.get(word.buffer)) is not None:
                self._memory[position] = found + word.offset
            else:
                self._outside_words.append((position, word))
        self._next = start + round_up(len(words), LINE)
        return int(self._memory.ctypes.data) + WORD * start
