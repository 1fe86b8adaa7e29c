"""A program's table in memory, read back as native code reads it."""

from __future__ import annotations

import ctypes
import struct

import pytest
from torch import nn

from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.kernel import Address, Command, Kernel, Unit
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import CACHE_LINE, host
from onelaunch.engines.cpu.program.program import Program, program_of
from onelaunch.engines.cpu.program.table import Table
from onelaunch.engines.cpu.session import settings_for
from tests.engines.cpu.runs import data, make

ARENA = 2**40
NAMES = ("x", "y", "rows", "order", "seed", "validation_x", "validation_y", "validation_rows")
OUTSIDE = {name: number * 2**20 for number, name in enumerate(NAMES, 1)}


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def address_of(unit: Unit, kernel: Kernel) -> int:
    return 2**50 + sum(map(ord, unit.name + kernel.name)) * CACHE_LINE


@pytest.fixture(scope="module")
def program() -> Program:
    x, y = data("cross_entropy", 64, 9, 3)
    model = nn.Sequential(nn.Linear(9, 70), nn.LeakyReLU(0.3), nn.Dropout(0.5), nn.Linear(70, 3))
    run = make(model, x, y, (x, y), steps=1, batch_size=32)
    return program_of(Plan(settings_for(run, partitions=2), host()))


def assert_holds(program: Program, address: int, command: Command, outside: dict[str, int]) -> None:
    """The fields of a command at `address` are its values."""

    def expected(place: Address) -> int:
        buffer = program.plan.buffers.get(place.buffer)
        return place.offset + (ARENA + buffer.offset if buffer else outside[place.buffer])

    assert address % CACHE_LINE == 0
    for name, word in zip(command.kernel.fields, words(address, len(command.kernel.fields)), strict=True):
        value = command.values[name]
        if isinstance(value, Address):
            assert word == expected(value)
        elif isinstance(value, tuple):
            assert words(word, len(value)) == [expected(place) for place in value]
        elif isinstance(value, float):
            assert struct.pack("<i", word) == struct.pack("<f", value)
        else:
            assert word == value


def assert_is(program: Program, table: Table, outside: dict[str, int]) -> None:
    """Every entry point of the table has the program's lists."""
    for name, lists in program.lists.items():
        fields = dict(zip(driver.RUN.fields, words(table.entries[name], len(driver.RUN.fields)), strict=True))
        assert fields["order"] == outside["order"]
        assert fields["all_rows"] == outside["rows" if name.startswith("train") else "validation_rows"]
        for field, commands in zip(("before", "commands"), lists, strict=True):
            pairs = words(fields[field], 2 * len(commands) + 2)
            assert pairs[0:-2:2] == [address_of(command.unit, command.kernel) for command in commands]
            assert pairs[-2:] == [0, 0]
            for address, command in zip(pairs[1:-2:2], commands, strict=True):
                assert_holds(program, address, command, outside)


def test_native_code_reads_the_commands_of_the_program(program: Program) -> None:
    table = Table(program.template, address_of, ARENA, OUTSIDE)
    assert_is(program, table, OUTSIDE)


def test_tables_of_one_program_are_bound_apart(program: Program) -> None:
    first, second = (Table(program.template, address_of, ARENA, OUTSIDE) for _ in range(2))
    moved = {name: value + 64 for name, value in OUTSIDE.items()}
    for _ in range(2):
        second.bind(moved)
    assert_is(program, first, OUTSIDE)
    assert_is(program, second, moved)


def test_a_value_that_commands_name_must_be_given(program: Program) -> None:
    with pytest.raises(KeyError, match="seed"):
        Table(program.template, address_of, ARENA, {name: value for name, value in OUTSIDE.items() if name != "seed"})
