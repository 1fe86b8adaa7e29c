"""Object code on disk: used again, and compiled anew where an entry is damaged."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path

import pytest
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu import cache
from onelaunch.engines.cpu.plan.target import host
from onelaunch.engines.cpu.session import CpuSession, settings_for
from tests.engines.cpu.runs import data, make, train_natively
from tests.spoiled import DAMAGES, spoil


@pytest.fixture
def run() -> Run:
    x, y = data("cross_entropy", 20, 5, 3)
    return make(nn.Sequential(nn.Linear(5, 3)), x, y, steps=4)


def started_from_cache(run: Run, cache_folder: Path) -> bool:
    session = CpuSession(run, {}, cache_folder=cache_folder)
    session.close()
    return session.native.cached


def test_the_second_start_is_cached(run: Run, tmp_path: Path) -> None:
    assert not started_from_cache(run, tmp_path)
    assert started_from_cache(run, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".o"]


@pytest.mark.parametrize("damage", [*DAMAGES, "no header", "unreadable"])
def test_a_bad_entry_is_made_anew(damage: str, run: Run, cache_folder: Path, tmp_path: Path) -> None:
    good = train_natively(run, cache_folder)
    name = f"{cache.key_of(settings_for(run), host())}.o"
    entry = Path(shutil.copy(cache_folder / name, tmp_path / name))
    match damage:
        case "no header":
            entry.write_bytes(entry.read_bytes().split(b"\n", 3)[3])
        case "unreadable":
            entry.unlink()
            entry.mkdir()
        case _:
            spoil(entry, damage)
    assert train_natively(run, tmp_path).losses.equal(good.losses)
    if damage != "unreadable":
        assert entry.read_bytes() == (cache_folder / name).read_bytes()


def test_a_folder_that_cannot_be_written_is_ignored(run: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert not started_from_cache(run, blocked)


def test_the_key_follows_code_and_machine_but_not_layer_names(run: Run) -> None:
    settings, target = settings_for(run), host()
    key = cache.key_of(settings, target)
    assert key != cache.key_of(dataclasses.replace(settings, batch=settings.batch + 1), target)
    assert key != cache.key_of(settings, dataclasses.replace(target, features=target.features + ",+none"))
    assert key != cache.key_of(settings, dataclasses.replace(target, llvm="0"))
    renamed = nn.Sequential()
    renamed.add_module("other", copy.deepcopy(run.model[0]))  # type: ignore[index]
    other = make(renamed, run.x, run.y, steps=9, lr=0.3, seed=5)
    assert key == cache.key_of(settings_for(other), target)
