"""The scripts in benchmarks/ run here as far as they can without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from onelaunch.bench.run import select
from tests.conftest import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cold_launch_script_imports() -> None:
    assert callable(script("cold_launch").main)


def test_what_is_warmed_up_is_in_the_registry() -> None:
    """A filter that matches nothing would warm nothing, and nobody would see."""
    for name, (command, filters) in script("record").GROUPS.items():
        group = command[command.index("bench") + 1] if "bench" in command else None
        for part in filters:
            assert group is not None, name
            assert select([group], part), f"{name}: --filter {part}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would record for minutes")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "this machine has no CUDA device"), (["--skip", "train,typo"], "--skip typo: pass some of train, large")],
)
def test_what_it_cannot_record_it_says_at_once(arguments: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "record.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
