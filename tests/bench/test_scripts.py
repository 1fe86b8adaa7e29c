"""The scripts in benchmarks/ run here as far as they can without a GPU."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from onelaunch.bench.run import select
from onelaunch.report.recorded import read_recorded
from tests.conftest import ROOT


def script(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def test_the_cold_launch_script_imports() -> None:
    assert callable(script("cold_launch").main)


def test_what_is_warmed_up_is_in_the_registry() -> None:
    """A filter that matches nothing would warm nothing, and nobody would see."""
    for name, group in script("record").GROUPS.items():
        for option, part in group.parts:
            if option == "--filter":
                kind = group.command[group.command.index("bench") + 1]
                assert select([kind], part), f"{name}: --filter {part}"


def test_results_in_a_folder_of_their_own_are_taken_out_of_it(tmp_path: Path) -> None:
    """`compare` itself, at the size of a test: what the group of the sizes records is what `make readme` draws."""
    record = script("record")
    command = [*record.ONELAUNCH, "compare", "--data", "digits", "--hidden", "8", "--steps", "3", "--engine", "eager"]
    group = record.Group((*command, "--sizes", "4,8", "--out"), inside=record.GROUPS["sizes"].inside)
    assert group.record(tmp_path / "sizes.json")
    assert [sizes.content["sizes"]["hidden"] for sizes in read_recorded(tmp_path).sizes] == [[4, 8]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would record for minutes")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "this machine has no CUDA device"), (["--skip", "train,typo"], "no group typo: pass some of train, large")],
)
def test_what_it_cannot_record_it_says_at_once(arguments: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "record.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr
