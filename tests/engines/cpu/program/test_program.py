"""The whole program: code for other machines compiles and, where this one can run it, trains; the IR is readable."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu.code import product
from onelaunch.engines.cpu.code.kernel import Unit
from onelaunch.engines.cpu.code.tile import COUNTS, cover
from onelaunch.engines.cpu.code.units import text_of
from onelaunch.engines.cpu.native import machine_for, object_code
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import Target, host, named
from onelaunch.engines.cpu.program.program import program_of
from onelaunch.engines.cpu.session import settings_for
from tests.engines.cpu.native_functions import runnable_targets
from tests.engines.cpu.runs import assert_close, data, make, train_natively, train_plainly


def everything(steps: int = 40) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(21, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5)
    )  # fmt: skip
    x, y = data("cross_entropy", 61, 21, 5)
    return make(model, x, y, (x, y), steps=steps, batch_size=16, momentum=0.9)


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("target", runnable_targets()[1:], ids=lambda target: target.cpu)
def test_narrower_vectors_compute_the_same(target: Target, partitions: int, cache_folder: Path) -> None:
    run = everything()
    ours = train_natively(run, cache_folder, target=target, partitions=partitions)
    assert_close(ours, train_plainly(run))


def test_uint8_rows_with_and_without_fma(cache_folder: Path) -> None:
    x = torch.arange(256, dtype=torch.uint8).view(8, 32)
    run = make(nn.Sequential(nn.Linear(32, 3)), x, torch.zeros(8, dtype=torch.int64), steps=8, batch_size=8)
    for target in runnable_targets():
        ours = train_natively(run, cache_folder, target=target)
        assert_close(ours, train_plainly(run))


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-macosx", "x86_64-pc-windows-msvc"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_code_for_other_machines_compiles(triple: str, optimizer: str) -> None:
    target = named(triple)
    model = nn.Sequential(nn.Linear(9, 12), nn.BatchNorm1d(12), nn.GELU(), nn.Dropout(0.3), nn.Linear(12, 3))
    x, y = data("cross_entropy", 16, 9, 3)
    run = make(model, x, y, steps=1, optimizer=optimizer)
    settings = dataclasses.replace(settings_for(run), partitions=2)
    for unit in program_of(Plan(settings, target)).units:
        assert len(object_code(text_of(unit, target), machine_for(target, foreign=True))) > 500


def test_no_call_leaves_the_program() -> None:
    """Neither libm nor memcpy: the object needs no library on any platform."""
    for unit in program_of(Plan(settings_for(everything()), host())).units:
        declared = re.findall(r"^declare .*@([\w.]+)\(", text_of(unit, host()), re.M)
        assert all(name.startswith("llvm.") for name in declared)


def test_the_program_of_a_small_network_is_readable() -> None:
    """With no more classes than the shortest vectors hold."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    x, y = data("cross_entropy", 64, 64, 4)
    program = program_of(Plan(settings_for(make(model, x, y, steps=1, batch_size=32)), host()))
    before, commands = program.lists["train.alone"]
    assert [command.kernel.name for command in before] == ["gather"]
    names = [command.kernel.name.rstrip("_12") for command in commands]
    assert names == [
        "product", "product", "few_classes", "product", "weight_update", "bias_update", "reduce", "weight_update",
        "bias_update", "gather",
    ]  # fmt: skip
    text = text_of(product.UNIT, host())
    # Results are named after their content, not numbered.
    assert re.search(r"%a_row\.\d+ = load", text)
    assert not re.search(r"^\s+%\d+ = ", text, re.M)
    assert max(map(len, text.splitlines())) < 700


def test_a_new_width_depth_or_batch_needs_no_new_code() -> None:
    def units(*widths: int, batch: int) -> set[Unit]:
        layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
        x, y = data("cross_entropy", 64, widths[0], widths[-1])
        run = make(nn.Sequential(*layers[:-1]), x, y, (x, y), steps=1, batch_size=batch)
        return set(program_of(Plan(settings_for(run), host())).units)

    assert units(64, 32, 4, batch=32) == units(21, 133, 57, 33, 2, batch=17)


@pytest.mark.parametrize("rows", [*range(1, 60), 100, 784, 4096])
@pytest.mark.parametrize("heights", [(13, 12, 8), (10, 9, 8), (6, 5, 2), (12, 8)])
def test_tiles_cover_every_row_once(rows: int, heights: tuple[int, ...]) -> None:
    tiles = cover(0, rows, heights)
    counts = [tiles[name] for name in COUNTS]
    used = [height for count, height in zip(counts, heights, strict=False) for _ in range(count)]
    assert sum(used[:-1]) + tiles["last_rows"] == rows
    assert 0 < tiles["last_rows"] <= used[-1]
