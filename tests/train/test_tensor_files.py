"""safetensors files at any path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import nn

import onelaunch as ol
from onelaunch.train.tensor_files import open_tensors, read_tensors

TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor([7])}
linux = pytest.mark.skipif(sys.platform != "linux", reason="names files by their descriptors")


def write(path: Path) -> Path:
    path.write_bytes(save(TENSORS, {"made": "here"}))
    return path


def test_tensors_and_metadata(tmp_path):
    found, metadata = read_tensors(write(tmp_path / "a.safetensors"))
    assert metadata == {"made": "here"}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


@linux
def test_a_file_that_is_replaced_while_it_is_open_stays_the_same(tmp_path):
    path = write(tmp_path / "a.safetensors")
    with open_tensors(path) as file:
        os.replace(write(tmp_path / "b.safetensors"), path)
        path.write_bytes(b"no longer")
        found = file.get_tensor("weight")
    assert torch.equal(found, TENSORS["weight"])


def test_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        read_tensors(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"not one")
    with pytest.raises(SafetensorError):
        read_tensors(tmp_path / "bad.safetensors")


@linux
def test_checkpoints_of_runs_and_sweeps_at_a_path_that_is_not_utf8(tmp_path):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    folder.mkdir()
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    options = {"engine": "eager", "progress": False}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    ol.fit(model, x, y, epochs=1, checkpoint=folder / "run.safetensors", **options)
    history = ol.fit(model, x, y, epochs=2, checkpoint=folder / "run.safetensors", resume=True, **options)
    assert [epoch["epoch"] for epoch in history.epochs] == [0, 1]
    arguments = {"grid": {"lr": [0.1, 0.01]}, "epochs": 1, "checkpoint": folder / "sweep", **options}
    first, again = (ol.sweep(model, x, y, **arguments) for _ in range(2))
    assert [record.losses for record in again.histories] == [record.losses for record in first.histories]
