from __future__ import annotations

import os

import pytest

from onelaunch.files import remove_leftovers, write_atomic


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_leftovers_of_the_killed_are_removed(tmp_path):
    (tmp_path / ".file.123.tmp").write_text("half")
    (tmp_path / "file.tmp").write_text("the user's own")
    remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.tmp"]
