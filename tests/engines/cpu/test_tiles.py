"""Products in tiles from bf16 operands: against a NumPy model of the algorithm, and in whole runs.

A machine without AMX runs the emulated blocks, one with AMX both.
"""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu.code import pack, tile_products
from onelaunch.engines.cpu.code.emit import Module
from onelaunch.engines.cpu.code.kernel import Kernel, Unit
from onelaunch.engines.cpu.code.optimizer import UpdateRule
from onelaunch.engines.cpu.code.pack import BLOCK, STEP_BYTES, TERMS
from onelaunch.engines.cpu.code.tile_products import STEP_OF_PAIRS
from onelaunch.engines.cpu.code.units import text_of
from onelaunch.engines.cpu.native import machine_for, object_code
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import Target, host, named
from onelaunch.engines.cpu.session import CpuSession, settings_for
from onelaunch.integers import ceil_div
from tests.engines.cpu.native_functions import Array, Loaded
from tests.engines.cpu.runs import (
    Bystander,
    assert_close,
    assert_same_bits,
    copy_of,
    data,
    make,
    train_natively,
    train_plainly,
)

pytestmark = pytest.mark.skipif(host().lanes != 16, reason="tiles need AVX-512 beside them")
KINDS = ("emulated", *[host().tiles] * bool(host().tiles))
TOLERANCES = {"tf32": (3e-5, 3e-5), "bf16": (2e-2, 2e-2)}  # of losses, relative, and of weights


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    return dataclasses.replace(host(), tiles=request.param)


def planes_of(x: Array, planes: int) -> list[Array]:
    """The nearest bf16 numbers, then those nearest to the rest, all as float32."""
    found, rest = [], torch.from_numpy(x)
    for _ in range(planes):
        found.append(rest.bfloat16().float())
        rest = rest - found[-1]
    return [plane.numpy() for plane in found]


def model_of_tiles(a: Array, b: Array, planes: int) -> Array:
    """a @ b as tiles compute it: per pair of planes and per step of 32 terms, one sum of exact products in fp32."""
    lefts, rights = planes_of(a, planes), planes_of(b, planes)
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for n, m in sorted(((n, m) for n in range(planes) for m in range(planes) if n + m < planes), key=sum):
        for first in range(0, a.shape[1], TERMS):
            step = slice(first, first + TERMS)
            total += (lefts[n][:, step].astype(np.float64) @ rights[m][step].astype(np.float64)).astype(np.float32)
    return total


class Kernels:
    """The kernels of some unit, called with the values of their fields."""

    def __init__(self, target: Target, planes: int) -> None:
        module = Module(target)
        tile_products.emit(module, planes)
        tile_products.emit_update(module, planes, UpdateRule("sgd"))
        self._loaded = Loaded(module)

    def __call__(self, kernel: Kernel, step: Array, **fields: Any) -> None:
        words = np.zeros(len(kernel.fields), np.int64)
        for position, (name, type_) in enumerate(kernel.fields.items()):
            value = fields[name]
            if type_ == "float":
                value = np.float32(value).view(np.int32)
            words[position] = value.ctypes.data if isinstance(value, np.ndarray) else value
        function = self._loaded.function(kernel.name, ctypes.c_void_p, ctypes.c_void_p)
        function(words.ctypes.data, step.ctypes.data)


def nan_bytes(size: int) -> Array:
    """Memory whose every number is NaN, at a cache line."""
    raw = np.full(size + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("rows", "inputs", "width"), [(48, 70, 32), (17, 64, 16), (64, 33, 32)])
def test_the_forward_pass_follows_the_model(target: Target, planes: int, rows: int, inputs: int, width: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, inputs), np.float32)
    weights = random.standard_normal((inputs, width), np.float32)
    bias = random.standard_normal(width, np.float32)
    steps = ceil_div(inputs, TERMS)
    left_row = STEP_BYTES * (steps | 1)
    left_plane = left_row * BLOCK * ceil_div(rows, BLOCK)
    left, right, c = (
        nan_bytes(planes * left_plane),
        nan_bytes(planes * STEP_OF_PAIRS * steps),
        np.zeros((rows, width), "f4"),
    )
    block, step = nan_bytes(4 * BLOCK * BLOCK), np.zeros(8, np.int64)
    kernels = Kernels(target, planes)
    kernels(
        pack.PACK_ROWS, step, source=x, odd_source=x, source_row=inputs, source_step=TERMS, last_row=inputs,
        last_columns=inputs - TERMS * (steps - 1), first=0, rows=rows, steps=steps, target=left, row_bytes=left_row,
        step_bytes=STEP_BYTES, plane=left_plane,
    )  # fmt: skip
    kernels(
        tile_products.FORWARD, step, left=left, left_row=left_row, left_plane=left_plane, right=right,
        plane=STEP_OF_PAIRS * steps, steps=steps, block=block, weights=weights, weights_panel=0, panels=1, width=width,
        rows=inputs, bias=bias, c=c, c_row=width, batch_rows=rows, floor=0.0,
    )  # fmt: skip
    expected = np.maximum(model_of_tiles(x, weights, planes) + bias, 0)
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("planes", [1, 2])
def test_weight_gradients_follow_the_model(target: Target, planes: int) -> None:
    rows, inputs, width = 41, 50, 32
    random = np.random.default_rng(0)
    x, gradient = random.standard_normal((rows, inputs), np.float32), random.standard_normal((rows, width), np.float32)
    steps = ceil_div(rows, TERMS)
    left_row = STEP_BYTES * (steps | 1)
    left_plane = left_row * BLOCK * ceil_div(inputs, BLOCK)
    left, right = nan_bytes(planes * left_plane), nan_bytes(planes * STEP_OF_PAIRS * steps)
    block, weights = nan_bytes(4 * BLOCK * BLOCK), np.zeros((inputs, width), np.float32)
    scalars, step = np.ones(8, np.float32), np.zeros(8, np.int64)  # with a rate of 1 the update adds the gradient
    step[6] = scalars.ctypes.data
    kernels = Kernels(target, planes)
    kernels(
        pack.PACK_TRANSPOSED, step, source=x, odd_source=x, source_row=inputs, rows=rows, columns=inputs, steps=steps,
        target=left, row_bytes=left_row, plane=left_plane,
    )  # fmt: skip
    kernels(
        pack.PACK_PAIRS, step, source=gradient, panels=1, source_panel=0, width=width, rows=rows, steps=steps,
        target=right, target_panel=0, plane=STEP_OF_PAIRS * steps,
    )  # fmt: skip
    kernels(
        tile_products.WEIGHT_UPDATE, step, left=left, left_row=left_row, left_plane=left_plane, right=right,
        plane=STEP_OF_PAIRS * steps, steps=steps, block=block, right_panel=0, panels=1, width=width, first=0, last=inputs,
        weights=weights, weights_panel=0, state_stride=0, hyper=scalars, x=0, row_bytes=0, lines=0, pieces=0,
        times=0, batch=rows, first_next=0,
    )  # fmt: skip
    np.testing.assert_allclose(weights, model_of_tiles(x.T.copy(), gradient, planes), rtol=1e-5, atol=1e-5)


def tiled_run(precision: str, *, norm: bool = False, **options: Any) -> Run:
    """Widths of one, one and a half and several panels; with `norm`, all that can follow a product."""
    torch.manual_seed(0)
    between: list[nn.Module] = [nn.LayerNorm(80), nn.GELU(), nn.Dropout(0.2)] if norm else [nn.ReLU()]
    more: list[nn.Module] = [nn.BatchNorm1d(133), nn.Tanh()] if norm else [nn.ReLU()]
    model = nn.Sequential(nn.Linear(70, 80), *between, nn.Linear(80, 133), *more, nn.Linear(133, 64), nn.Linear(64, 5))
    x, y = data("cross_entropy", 170, 70, 5)
    return make(model, x, y, (x[:40], y[:40]), precision=precision, **{"batch_size": 73, "steps": 30, **options})


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", [{}, {"optimizer": "adam", "lr": 1e-3, "batch_size": 64}], ids=["sgd", "adam"])
def test_runs_in_tiles_follow_plain_pytorch(
    precision: str, norm: bool, options: dict[str, Any], target: Target, cache_folder: Path
) -> None:
    run = tiled_run(precision, norm=norm, **options)
    losses, weights = TOLERANCES[precision]
    if "optimizer" in options:
        losses, weights = 10 * losses, 0.03  # Adam divides a gradient by its size, be it only rounding: 30 steps of lr
    ours = train_natively(run, cache_folder, target=target, partitions=2)
    assert_close(ours, train_plainly(run), losses=losses, weights=weights)


@pytest.mark.parametrize("partitions", [1, 2, 3])
def test_threads_do_not_change_the_bits(partitions: int, target: Target, cache_folder: Path) -> None:
    courses = []
    for together in (False, partitions > 1):
        own = copy_of(tiled_run("tf32", norm=True))
        session = CpuSession(own, {}, cache_folder=cache_folder, target=target, partitions=partitions)
        session.team.probing, session.team.uses_threads = False, together
        segments = list(session.segments(0, Bystander()))
        session.close()
        courses.append((torch.cat([segment.losses for segment in segments]), own.model))
    assert torch.equal(courses[0][0], courses[1][0])
    for name, tensor in courses[0][1].state_dict().items():
        assert torch.equal(tensor, courses[1][1].state_dict()[name]), name


@pytest.mark.parametrize(("precision", "width"), [("bf16", 40), ("tf32", 80)])
def test_narrow_layers_and_small_batches_stay_in_fp32(
    precision: str, width: int, target: Target, cache_folder: Path
) -> None:
    """Bit for bit the run in fp32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, width), nn.ReLU(), nn.Linear(width, 5))
    x, y = data("cross_entropy", 64, 70, 5)
    runs = [make(model, x, y, steps=8, batch_size=32, precision=name) for name in ("fp32", precision)]
    assert_same_bits(*(train_natively(run, cache_folder, target=target) for run in runs))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_code_for_amx_compiles(optimizer: str) -> None:
    features = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16", "amx-tile", "amx-bf16")
    target = dataclasses.replace(named("x86_64-unknown-linux-gnu", "sapphirerapids", features), tiles="amx")
    machine = machine_for(target, foreign=True)
    plan = Plan(dataclasses.replace(settings_for(tiled_run("tf32")), optimizer=optimizer), target)
    assert [plan.in_tiles(stage) for stage in plan.stages] == [False, True, True, True, False]
    for unit in (Unit("tile_products", (2,)), Unit("tile_update", (1, UpdateRule(optimizer)))):
        text = text_of(unit, target)
        assert "tdpbf16ps" in text
        assert len(object_code(text, machine)) > 500
