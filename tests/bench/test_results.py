from __future__ import annotations

import importlib.metadata
import shutil
import subprocess

import pytest

from onelaunch.bench import results
from onelaunch.errors import OnelaunchError


def test_tree_hash_is_that_of_git(tmp_path):
    for name in ("b.py", "a/c.cuh", "a/deep/d.py", "a.py", "é.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"of {name}\n", encoding="utf-8")

    def git(*command: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
        done = subprocess.run(("git", "-C", tmp_path, *identity, *command), capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    expected = git("write-tree")
    shutil.rmtree(tmp_path / ".git")
    (tmp_path / "__pycache__").mkdir()
    assert results.tree_of(tmp_path) == expected


def test_the_versions_of_peers_are_recorded():
    found = results.provenance("")["machine"]["versions"]
    assert found["scikit-learn"] == importlib.metadata.version("scikit-learn")
    assert found["torch"]


def test_no_commit_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert results.commit() == ""


def test_a_name_too_long_for_a_temporary_file_is_refused(tmp_path):
    with pytest.raises(OnelaunchError, match="cannot be written: File name too long"):
        results.check_writable(tmp_path / f"{'y' * 240}.json")
    results.check_writable(tmp_path / "short.json")
    assert not list(tmp_path.iterdir())
