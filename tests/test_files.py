from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from onelaunch import files
from onelaunch.files import cache_folder, digest_of_file, exclusive_lock, read_text, remove_leftovers, write_atomic


def test_without_a_home_the_cache_is_deleted_with_the_process(monkeypatch, tmp_path):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("cpu") == tmp_path / "onelaunch" / "cpu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    folder = cache_folder("cpu")
    assert folder == cache_folder("cpu")
    assert folder.parents[2].stat().st_mode & 0o77 == 0


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    one.write_bytes(b"1,2\n")
    same.write_bytes(b"1,2\n")
    other.write_bytes(b"1,3\n")
    assert digest_of_file(one) == digest_of_file(same) != digest_of_file(other)


@pytest.mark.parametrize(("changed", "differs"), [(0, True), (999, True), (500, False), (None, False)])
def test_the_digest_of_a_large_file_has_both_ends_and_blocks_between(tmp_path, monkeypatch, changed, differs):
    monkeypatch.setattr(files, "MAX_WHOLE_DIGEST", 100)
    monkeypatch.setattr(files, "DIGEST_BLOCKS", 4)
    monkeypatch.setattr(files, "DIGEST_BLOCK_BYTES", 10)  # at 0, 330, 660 and 990
    path = tmp_path / "large"
    path.write_bytes(bytes(1000))
    before = digest_of_file(path)
    content = bytearray(1000)
    if changed is not None:
        content[changed] = 1
    path.write_bytes(content)
    assert (digest_of_file(path) != before) == differs
    path.write_bytes(bytes(1001))
    assert digest_of_file(path) != before


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


def test_only_the_leftovers_of_the_named_file_are_removed(tmp_path):
    for name in (".a[1].5-6.tmp", ".a1.5-6.tmp", ".b.5-6.tmp", "a[1]"):
        (tmp_path / name).write_text("half")
    remove_leftovers(tmp_path, "a[1]")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".a1.5-6.tmp", ".b.5-6.tmp", "a[1]"]


def test_leftovers_of_killed_writers_are_removed(tmp_path):
    (tmp_path / ".file.123.tmp").write_text("half")
    (tmp_path / "file.tmp").write_text("the user's own")
    remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file.tmp"]


def test_one_holder_at_a_time(tmp_path):
    path = tmp_path / "run"
    with exclusive_lock(path), pytest.raises(BlockingIOError), exclusive_lock(path):
        pass
    assert not list(tmp_path.iterdir())
    with exclusive_lock(path):
        pass


def test_a_killed_holder_holds_nothing(tmp_path):
    path = tmp_path / "run"
    # The file alone: importing the package would import torch.
    program = f"""
import pathlib, runpy, time
with runpy.run_path({files.__file__!r})["exclusive_lock"](pathlib.Path({str(path)!r})):
    print("locked", flush=True)
    time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(BlockingIOError), exclusive_lock(path):
            pass
        holder.kill()
        holder.wait()
        with exclusive_lock(path):
            pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFOs")
def test_a_fifo_is_read_and_one_without_a_writer_is_empty(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_text(pipe) == ""
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # so that the writer need not wait for a reader
    with open(pipe, "w") as writer:
        writer.write("words")
        writer.flush()
        threading.Timer(0.2, writer.close).start()
        assert read_text(pipe) == "words"
    os.close(reading)


def test_a_device_is_refused():
    with pytest.raises(OSError, match="it is a device"):
        read_text(Path("/dev/zero"))
