"""A program in memory, as the driver reads it: lists of (kernel, fields), with every address filled in."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

import numpy as np

from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.kernel import Address, Command, FieldValue, Kernel, Unit
from onelaunch.engines.cpu.plan.target import CACHE_LINE
from onelaunch.engines.cpu.program.program import Program

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
        self._memory = np.zeros(self._max_words(program), np.int64)
        self._address = int(self._memory.ctypes.data)
        words = self._words = list[int | Address]([0] * (-self._address % CACHE_LINE // WORD))
        self.entries = {name: self._entry(program, name, *lists) for name, lists in program.lists.items()}
        # The words that `bind` sets, by their position.
        self._outside = [(position, word) for position, word in enumerate(words) if isinstance(word, Address)]
        self._memory[: len(words)] = [0 if isinstance(word, Address) else word for word in words]
        self.bind(outside)

    def bind(self, outside: Mapping[str, int]) -> None:
        """Set the addresses and numbers that are outside the arena. Entry points keep their addresses."""
        for position, address in self._outside:
            self._memory[position] = outside[address.buffer] + address.offset

    @staticmethod
    def _max_words(program: Program) -> int:
        lists = [each for lists in program.lists.values() for each in lists]
        commands = {id(command): command for each in lists for command in each}.values()
        size = sum(len(command.values) + LINE for command in commands) + sum(2 * len(each) + 2 + LINE for each in lists)
        size += sum(
            len(v) + LINE for c in commands if c.kernel.has_lists for v in c.values.values() if isinstance(v, tuple)
        )
        return size + len(program.lists) * (len(driver.RUN.fields) + LINE) + LINE

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
        values = [command.values[name] for name in command.kernel.fields]
        return self._write([value if type(value) is int else self._word(value) for value in values])

    def _word(self, value: FieldValue) -> int | Address:
        if isinstance(value, int):
            return value
        if isinstance(value, Address):
            found = self._offsets.get(value.buffer)
            return value if found is None else found + value.offset
        if isinstance(value, float):
            return int(struct.unpack("<i", struct.pack("<f", value))[0])
        return self._write([self._word(item) for item in value])

    def _write(self, words: list[int | Address]) -> int:
        """Store words at the next cache line and return their address."""
        start = len(self._words)
        self._words += words
        self._words += [0] * (-len(words) % LINE)
        return self._address + WORD * start
