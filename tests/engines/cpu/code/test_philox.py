"""Row order and dropout bits from native code equal those of `onelaunch.rng`, bit for bit."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
import torch

from onelaunch.engines.cpu.code import philox
from onelaunch.engines.cpu.code.emit import Module
from onelaunch.engines.cpu.code.kernel import STEP
from onelaunch.engines.cpu.plan.target import Target, host
from onelaunch.integers import round_up
from onelaunch.rng import dropout_bits, permutation, permutation_bits, signed_seed
from tests.engines.cpu.native_functions import Loaded, runnable_targets

REGIONS = [(0, 5, 0, 16), (0, 32, 32, 96), (16, 16, 0, 48), (0, 3, 64, 8), (3, 1, 0, 1000)]


@pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)
def test_row_order(target: Target) -> None:
    module = Module(target)
    philox.row_order(module)
    loaded = Loaded(module)
    function = loaded.function("row_order", ctypes.c_void_p, *[ctypes.c_int64] * 4)
    for rows in (1, 2, 3, 31, 37, 255, 256, 257, 1000, 60_000):
        for seed, epoch in ((0, 0), (2**64 - 1, 3), (12345, 2**33 + 5)):
            order = np.full(rows + 16, -1, np.int32)
            function(order.ctypes.data, rows, permutation_bits(rows), signed_seed(seed), epoch)
            assert torch.equal(torch.from_numpy(order[:rows]).long(), permutation(rows, seed, epoch))


@functools.cache
def compiled() -> Loaded:
    module = Module(host())
    philox.emit_dropout(module)
    return Loaded(module)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("seed", [0, 2**64 - 1, 2**40 + 17])
def test_dropout_bits(region: tuple[int, int, int, int], seed: int) -> None:
    first_row, rows, first_column, columns = region
    pitch, number = round_up(columns, 8), 2**32 - 2
    bits = np.zeros(rows * pitch + 8 * host().lanes, np.uint16)
    fields = np.array(
        [bits.ctypes.data, signed_seed(seed), 2, rows * pitch // 8, pitch // 8, first_row, first_column // 8], np.int64
    )
    step = np.zeros(len(STEP), np.int64)
    step[list(STEP).index("step")] = number
    compiled().function("draw_bits", ctypes.c_void_p, ctypes.c_void_p)(fields.ctypes.data, step.ctypes.data)
    expected = dropout_bits(seed, 2, range(number, number + 1), first_row + rows, first_column + columns)[0]
    got = torch.from_numpy(bits[: rows * pitch].astype(np.int32)).view(rows, pitch)[:, :columns]
    assert torch.equal(got, expected[first_row:, first_column:])
