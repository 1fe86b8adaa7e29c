"""Rows are used where they are: little extra memory, and files larger than the memory that a process may use."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.train import arrays, inputs
from onelaunch.train.arrays import first_row_not_finite
from onelaunch.train.inputs import make_run
from tests.train.large_data import INPUTS, train

pytestmark = pytest.mark.usefixtures("one_thread")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def in_a_process(*arguments: object) -> list:
    command = [sys.executable, "-m", "tests.train.large_data", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["float32", "uint8", "read-only", "memory-mapped", "tensor"])
def test_contiguous_rows_are_not_copied(kind, tmp_path):
    x = (np.random.default_rng(0).random((40, 7)) * 200).astype(np.uint8 if kind == "uint8" else np.float32)
    if kind == "read-only":
        x.flags.writeable = False
    if kind == "memory-mapped":
        np.save(tmp_path / "x.npy", x)
        x = np.load(tmp_path / "x.npy", mmap_mode="r")
    given = torch.from_numpy(x) if kind == "tensor" else x
    run = make_run(nn.Sequential(nn.Linear(7, 3)), given, np.arange(40) % 3, None, {"epochs": 1})
    assert run.x.data_ptr() == x.ctypes.data


@linux
@pytest.mark.parametrize("options", [{}, {"validation": 0.1, "class_weight": "balanced"}])
def test_training_takes_little_more_than_the_data(options):
    _, nbytes, extra = in_a_process("measure", 1_000_000, json.dumps(options))
    assert nbytes == 200_000_000
    assert extra <= 80e6 + 0.1 * nbytes


@linux
@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_a_file_of_three_times_the_allowed_memory_trains_to_the_same_bits(engine, tmp_path):
    allowed, path = 40_000_000, tmp_path / "x.npy"
    x = np.random.default_rng(1).standard_normal((3 * allowed // (4 * INPUTS), INPUTS), dtype=np.float32)
    np.save(path, x)
    options = {"engine": engine}
    assert in_a_process("limited", path, allowed, json.dumps(options)) == [train(x, **options)]


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_rows_held_out_in_place_give_the_bits_of_a_copy(engine, monkeypatch):
    x, y = np.random.default_rng(2).standard_normal((400, 7)).astype(np.float32), np.arange(400) % 3
    runs = []
    for limit in (2**26, 0):
        monkeypatch.setattr(inputs, "MAX_COPIED_BYTES", limit)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
        history = ol.fit(
            model, x, y, epochs=3, validation=0.2, class_weight="balanced", sample_weight=np.linspace(0, 1, 400),
            engine=engine, progress=False,
        )  # fmt: skip
        runs.append((history.losses, [{**epoch, "seconds": 0} for epoch in history.epochs], model[0].weight))
    assert runs[0][:2] == runs[1][:2]
    assert torch.equal(runs[0][2], runs[1][2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_row_that_is_not_finite_is_found(bad, monkeypatch):
    monkeypatch.setattr(arrays, "CHECKED_VALUES", 30)
    x = torch.full((100, 7), 3e38)  # their sums overflow, and are no reason to refuse them
    assert first_row_not_finite(x) is None
    x[61, 3] = x[99, 0] = bad
    assert first_row_not_finite(x) == 61
