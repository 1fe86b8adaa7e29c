"""Object code on disk: used again, and compiled anew where an entry is damaged."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu import cache
from onelaunch.engines.cpu.code import product
from onelaunch.engines.cpu.code.kernel import Unit
from onelaunch.engines.cpu.code.optimizer import UpdateRule
from onelaunch.engines.cpu.native import Library, library
from onelaunch.engines.cpu.plan.target import host
from onelaunch.engines.cpu.session import CpuSession
from tests.engines.cpu.runs import data, make, train_natively
from tests.spoiled import DAMAGES, spoil


@pytest.fixture
def run() -> Run:
    x, y = data("cross_entropy", 20, 5, 3)
    return make(nn.Sequential(nn.Linear(5, 3)), x, y, steps=4)


def started_from_cache(run: Run, cache_folder: Path) -> bool:
    library.cache_clear()  # as in another process
    session = CpuSession(run, {}, cache_folder=cache_folder)
    session.close()
    return not session.compiled


def test_the_second_start_is_cached(run: Run, tmp_path: Path) -> None:
    assert not started_from_cache(run, tmp_path)
    assert started_from_cache(run, tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".o"}


def test_the_second_start_in_a_process_needs_no_disk(run: Run, tmp_path: Path) -> None:
    assert not started_from_cache(run, tmp_path)
    shutil.rmtree(tmp_path)
    session = CpuSession(run, {}, cache_folder=tmp_path)
    session.close()
    assert not session.compiled
    assert not tmp_path.exists()


@pytest.mark.parametrize("damage", [*DAMAGES, "no header", "unreadable"])
def test_a_bad_entry_is_made_anew(damage: str, run: Run, cache_folder: Path, tmp_path: Path) -> None:
    good = train_natively(run, cache_folder)
    name = f"{cache.key_of(product.UNIT, host())}.o"
    entry = Path(shutil.copy(cache_folder / name, tmp_path / name))
    match damage:
        case "no header":
            entry.write_bytes(entry.read_bytes().split(b"\n", 3)[3])
        case "unreadable":
            entry.unlink()
            entry.mkdir()
        case _:
            spoil(entry, damage)
    library.cache_clear()
    assert train_natively(run, tmp_path).losses.equal(good.losses)
    if damage != "unreadable":
        assert entry.read_bytes() == (cache_folder / name).read_bytes()


def test_a_folder_that_cannot_be_written_is_ignored(run: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not started_from_cache(run, blocked)


def test_the_key_follows_code_and_machine() -> None:
    unit, target = Unit("update", (UpdateRule("sgd"),)), host()
    key = cache.key_of(unit, target)
    assert key != cache.key_of(Unit("update", (UpdateRule("adam"),)), target)
    assert key != cache.key_of(unit, dataclasses.replace(target, features=target.features + ",+none"))
    assert key != cache.key_of(unit, dataclasses.replace(target, llvm="0"))


def test_a_library_with_nothing_to_load_links_nothing() -> None:
    assert Library(host(), None).load([]) == []
