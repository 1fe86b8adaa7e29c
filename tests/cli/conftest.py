from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from onelaunch.cli.app import make_app
from tests.cli.quick_run import QUICK


@dataclass
class Outcome:
    code: int
    out: str
    err: str


def invoke(*arguments: object) -> Outcome:
    """Run a command in this process, in its working directory."""
    result = CliRunner().invoke(make_app(), [str(argument) for argument in arguments], prog_name="onelaunch")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Callable[..., Outcome]:
    """Run a command in this process, inside an empty folder."""
    monkeypatch.chdir(tmp_path)
    return invoke


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Start a command as a process of its own, which a test may interrupt or kill; none outlives its test."""
    started: list[subprocess.Popen] = []

    def run(*arguments: object) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "onelaunch", *map(str, arguments)], cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def write_blobs(folder: Path) -> str:
    """Write a small classification file that is quick to learn; returns its path."""
    random = np.random.default_rng(0)
    y = np.arange(400) % 3
    x = random.normal(size=(400, 5)).astype(np.float32) + 2 * np.eye(5, dtype=np.float32)[y]
    path = folder / "blobs.npz"
    np.savez(path, x=x, y=y)
    return str(path)


@pytest.fixture
def blobs(tmp_path) -> str:
    """The path of a small classification file that is quick to learn."""
    return write_blobs(tmp_path)


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    outcome = invoke("train", "--data", write_blobs(folder), *QUICK, "--out", folder / "run")
    assert outcome.code == 0, outcome.err
    return folder / "run"


@pytest.fixture
def finished_run(trained_once, tmp_path) -> Path:
    """The folder `run` of a finished `onelaunch train --data blobs.npz`, with the options QUICK; the test may change it."""
    return shutil.copytree(trained_once, tmp_path / "run")
