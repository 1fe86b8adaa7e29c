"""The checkpoint folder of a sweep: a full disk does not lose the result, and every kind of damage is named in one line."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onelaunch as ol
from onelaunch.files import write_atomic
from onelaunch.sweep import store
from onelaunch.sweep.kept_weights import KeptWeights
from tests.sweep.models import make_model, rows, same_weights

pytest.importorskip("safetensors")
X, Y = rows()


def arguments(folder: Path | None) -> dict[str, Any]:
    return {"grid": {"lr": [1e-3, 1e-2]}, "epochs": 1, "validation": 0.2, "checkpoint": folder, "progress": False}


def part_of(folder: Path) -> Path:
    return next(folder.glob("part-*"))


def full_disk(monkeypatch: pytest.MonkeyPatch, failing: Any) -> None:
    """Let writes fail for paths of which `failing` is true."""

    def write(path: Path, content: bytes | str) -> None:
        if failing(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomic(path, content)

    monkeypatch.setattr(store, "write_atomic", write)


def test_a_full_disk_keeps_the_result_and_warns_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store, "MIN_SECONDS", 0.0)  # a part after each member
    monkeypatch.setattr(store, "SHARE_OF_TIME", 0.0)
    monkeypatch.setattr(KeptWeights, "get", lambda *_: None)
    full_disk(monkeypatch, lambda path: path.name.startswith("part-"))
    with caplog.at_level(logging.WARNING, "onelaunch"):
        result = ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert f"{tmp_path / 'kept' / 'part-000001.safetensors'} cannot be written: No space left on device" in lines[0]
    whole = ol.sweep(make_model, X, Y, **arguments(None))
    assert str(result.table) == str(whole.table)
    assert same_weights(result.best_model, whole.best_model)


def test_a_disk_that_is_full_for_a_while_loses_nothing(tmp_path, monkeypatch, caplog):
    failures = iter([True, False, False, False])
    monkeypatch.setattr(store, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(store, "SHARE_OF_TIME", 0.0)
    full_disk(monkeypatch, lambda path: path.name.startswith("part-") and next(failures))
    with caplog.at_level(logging.WARNING, "onelaunch"):
        ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    assert len(caplog.records) == 1
    found = store.Store(tmp_path / "kept", {}).load({})
    assert sorted(found) == [0, 1]


def test_a_full_disk_at_the_start_is_an_error(tmp_path, monkeypatch):
    full_disk(monkeypatch, lambda path: True)
    with pytest.raises(ol.CheckpointError, match=r"sweep\.json' cannot be written: No space left on device; free some"):
        ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))


def test_a_folder_that_is_deleted_during_the_sweep_does_not_end_it(tmp_path, caplog):
    def delete(history: ol.History) -> None:
        shutil.rmtree(tmp_path / "kept", ignore_errors=True)

    with caplog.at_level(logging.WARNING, "onelaunch"):
        result = ol.sweep(make_model, X, Y, callbacks=[delete], **arguments(tmp_path / "kept"))
    assert len(result.records) == 2
    assert ["cannot be written: No such file" in record.getMessage() for record in caplog.records] == [True]


def test_any_single_flipped_byte_is_noticed(tmp_path):
    ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    part = part_of(tmp_path / "kept")
    good = part.read_bytes()
    for position in np.random.default_rng().integers(len(good), size=60).tolist():
        part.write_bytes(good[:position] + bytes([good[position] ^ (1 << position % 8)]) + good[position + 1 :])
        with pytest.raises(
            ol.CheckpointError, match=r"part-000001\.safetensors' is damaged .*: delete this file"
        ) as caught:
            ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
        assert "\n" not in str(caught.value), position
    part.unlink()  # the remedy
    assert len(ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept")).records) == 2


@pytest.mark.parametrize(
    "content", ["", "[]", "{", "[" * 100_000, '{"grid": 1, "sha256": "0"}', "\udcff"], ids=range(6)
)
def test_a_damaged_description_is_named(tmp_path, content):
    ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    (tmp_path / "kept" / "sweep.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ol.CheckpointError, match=r"sweep\.json' is damaged .*: pass another folder"):
        ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))


def test_a_part_that_is_a_folder_and_files_of_others(tmp_path):
    ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    (tmp_path / "kept" / "part-mine.safetensors").write_bytes(b"mine")
    part_of(tmp_path / "kept").unlink()
    ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    (tmp_path / "kept" / "part-000007.safetensors").mkdir()
    with pytest.raises(ol.CheckpointError) as caught:
        ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    assert "\n" not in str(caught.value)


def test_weights_that_are_gone_or_damaged_are_trained_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(KeptWeights, "get", lambda *_: None)
    whole = ol.sweep(make_model, X, Y, **arguments(None))
    result = ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    part = part_of(tmp_path / "kept")
    good = part.read_bytes()
    part.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with caplog.at_level(logging.WARNING, "onelaunch"):
        found = [result.model(index) for index in range(2)]
        part.unlink()
        found += [result.model(index) for index in range(2)]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) in (3, 4)  # the byte belongs to one member, or to none
    assert all(str(part) in line and "is trained again" in line for line in lines)
    assert all(same_weights(model, whole.model(number % 2)) for number, model in enumerate(found))


def test_a_checkpoint_without_checksums_continues(tmp_path):
    """As older versions wrote it."""
    from safetensors.torch import load, safe_open, save

    first = ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    part = part_of(tmp_path / "kept")
    with safe_open(part, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    for entry in about["members"].values():
        del entry["sha256"]
    part.write_bytes(save(load(part.read_bytes()), {"about": json.dumps(about)}))
    description = tmp_path / "kept" / "sweep.json"
    content = json.loads(description.read_text())
    del content["sha256"]
    description.write_text(json.dumps(content))
    second = ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
    assert str(second.table) == str(first.table)
    assert len(list((tmp_path / "kept").glob("part-*"))) == 1
    assert same_weights(second.best_model, first.best_model)


def test_the_current_folder_is_a_checkpoint_and_has_one_writer(tmp_path, monkeypatch):
    (tmp_path / "kept").mkdir()
    monkeypatch.chdir(tmp_path / "kept")
    refused = []

    def second(history: ol.History) -> None:
        with pytest.raises(ol.CheckpointError, match="is in use by another sweep"):
            ol.sweep(make_model, X, Y, **arguments(tmp_path / "kept"))
        refused.append(history)

    ol.sweep(make_model, X, Y, callbacks=[second], **arguments(Path()))
    assert len(refused) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "part-000001.safetensors", "sweep.json"]


@pytest.mark.parametrize("strategy", ["grid", "halving"])
@pytest.mark.parametrize("n_jobs", [None, 2])
def test_ctrl_c_while_the_folder_is_read_keeps_what_is_finished(tmp_path, monkeypatch, strategy, n_jobs):
    """The folder is read to its end, nothing is trained, and a later start continues."""
    options = {"grid": {"lr": [1e-3, 1e-2, 0.1]}, "strategy": strategy, "folds": 2, "epochs": 2, "progress": False}
    add, read, folder = store.Store.add, store.Store._read, tmp_path / "kept"

    def all_but_one(self: store.Store, record: Any, weights: Any) -> None:
        if record.index != 5:
            add(self, record, weights)

    def interrupted(self: store.Store, *given: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return read(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "add", all_but_one)
        whole = ol.sweep(make_model, X, Y, checkpoint=folder, **options)
    with monkeypatch.context() as patch:
        patch.setattr(store.Store, "_read", interrupted)
        result = ol.sweep(make_model, X, Y, checkpoint=folder, n_jobs=n_jobs, **options)
    assert result.interrupted
    assert sorted(result.records) == [0, 1, 2, 3, 4]
    assert str(ol.sweep(make_model, X, Y, checkpoint=folder, **options).table) == str(whole.table)
