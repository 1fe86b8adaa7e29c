"""What differs between systems: on this one, and, as far as it can be tried here, without what the others lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onelaunch import operating_system

reads_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


@pytest.fixture
def container(tmp_path, monkeypatch):
    monkeypatch.setattr(operating_system, "CONTAINERS", tmp_path)
    return tmp_path


@reads_proc
def test_free_memory_is_that_of_the_machine(container):
    free = operating_system.free_memory()
    assert free is not None
    assert free > 2**20


@reads_proc
@pytest.mark.parametrize(("limit", "free"), [("1000000", 700_000), ("400000", 100_000), ("200000", 0)])
def test_the_limit_of_a_container_bounds_free_memory(container, limit, free):
    """What it uses counts, except for pages of files."""
    (container / "memory.max").write_text(f"{limit}\n")
    (container / "memory.current").write_text("500000\n")
    (container / "memory.stat").write_text("anon 300000\nfile 200000\nkernel 0\n")
    assert operating_system.free_memory() == free


@reads_proc
def test_a_container_without_a_limit_changes_nothing(container):
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("500000\n")
    free = operating_system.free_memory()
    assert free is not None
    assert free > 2**20


@pytest.mark.parametrize(
    ("system", "variables", "folder"),
    [
        ("linux", {}, "home/.cache"),
        ("linux", {"XDG_CACHE_HOME": "elsewhere"}, "elsewhere"),
        ("darwin", {"XDG_CACHE_HOME": "elsewhere"}, "home/Library/Caches"),
        ("win32", {}, "home/AppData/Local"),
        ("win32", {"LOCALAPPDATA": "local"}, "local"),
    ],
)
def test_each_system_has_its_cache_folder(system, variables, folder, monkeypatch):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", system)
    assert operating_system.user_cache(Path("home")) == Path(folder)


def test_a_system_without_proc_is_described_all_the_same(monkeypatch):
    real = Path.read_text

    def read_text(path, *args, **kwargs):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(str(path))
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert operating_system.free_memory() is None
    assert operating_system.cpu_name()
    assert operating_system.usable_cores() >= 1


ELSEWHERE = """
import ctypes, os, sys, types
import torch, numpy, safetensors.torch, llvmlite.binding  # they look at the real system
for name in ("fcntl", "resource", "triton", "triton.language"):
    sys.modules[name] = None
os.__dict__.pop("sched_getaffinity", None)
sys.platform = {system!r}
own = types.SimpleNamespace(SwitchToThread=ctypes.CDLL(None).sched_yield)  # the function of Windows that does the same
ctypes.WinDLL = lambda name: own
import onelaunch as ol
from onelaunch.operating_system import LOCKS, may_use_tiles
assert not LOCKS and not may_use_tiles()
from torch import nn
torch.manual_seed(0)
x = torch.randn(96, 6); y = (x[:, 0] > 0).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
history = ol.fit(model, x, y, epochs=3, validation=0.2, checkpoint="run.safetensors", progress=False)
resumed = ol.fit(model, x, y, epochs=4, validation=0.2, checkpoint="run.safetensors", resume=True, progress=False)
print(history.engine, len(resumed.epochs), len(ol.predict(model, x)))
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_training_needs_neither_locks_nor_triton(system, tmp_path):
    """The package is imported, trains on the CPU engine, saves and resumes where the modules of Linux are absent."""
    variables = {**os.environ, "LOCALAPPDATA": str(tmp_path), "HOME": str(tmp_path)}
    command = (sys.executable, "-c", ELSEWHERE.format(system=system))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu", "4", "96"], done.stdout + done.stderr
