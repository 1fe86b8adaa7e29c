from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from typer.testing import CliRunner

from onelaunch.cli import _app


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Callable[..., Outcome]:
    """Run a command in this process, inside an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Outcome:
        result = CliRunner().invoke(_app(), [str(argument) for argument in arguments], prog_name="onelaunch")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return run


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


@pytest.fixture
def blobs(tmp_path) -> str:
    """A small classification file that is quick to learn."""
    random = np.random.default_rng(0)
    y = np.arange(400) % 3
    x = random.normal(size=(400, 5)).astype(np.float32) + 2 * np.eye(5, dtype=np.float32)[y]
    path = tmp_path / "blobs.npz"
    np.savez(path, x=x, y=y)
    return str(path)
