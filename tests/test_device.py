"""What this machine has."""

from __future__ import annotations

import sys

import pytest

from onelaunch import device

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")


@pytest.fixture
def container(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "CONTAINERS", tmp_path)
    return tmp_path


def test_free_memory_is_that_of_the_machine(container):
    free = device.free_memory()
    assert free is not None
    assert free > 2**20


@pytest.mark.parametrize(("limit", "free"), [("1000000", 700_000), ("400000", 100_000), ("200000", 0)])
def test_the_limit_of_a_container_bounds_free_memory(container, limit, free):
    """What it uses counts, except for pages of files."""
    (container / "memory.max").write_text(f"{limit}\n")
    (container / "memory.current").write_text("500000\n")
    (container / "memory.stat").write_text("anon 300000\nfile 200000\nkernel 0\n")
    assert device.free_memory() == free


def test_a_container_without_a_limit_changes_nothing(container):
    (container / "memory.max").write_text("max\n")
    (container / "memory.current").write_text("500000\n")
    free = device.free_memory()
    assert free is not None
    assert free > 2**20
