"""The commands' options, and what a process imports before one of them runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from onelaunch.activations import ACTIVATIONS
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.spec import ENGINES, LOSSES, MEMORY, PRECISIONS

HEAVY = {"torch", "numpy", "rich", "matplotlib", "triton", "llvmlite"}


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("train", "--help")])
def test_help_and_version_import_nothing_heavy(arguments):
    """torch alone takes seconds to import."""
    command = (sys.executable, "-X", "importtime", "-m", "onelaunch", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = set(re.findall(r"\| +(\w+)[\w.]*$", done.stderr, re.M))
    assert {"typer", "onelaunch"} <= imported
    assert not imported & HEAVY
    assert done.stdout


def test_help_lists_the_names_of_every_table(cli):
    """On one line, to join the names that the help breaks off."""
    text = " ".join(cli("train", "--help").out.split())
    for names in (ACTIVATIONS, OPTIMIZERS, LOSSES, PRECISIONS, ENGINES, MEMORY):
        *others, last = names
        assert f"{', '.join(others)} or {last}" in text


def test_a_file_that_explain_loads_finds_the_public_names(start, tmp_path):
    """`onelaunch.fuse` is also a folder of the package, which must not hide the function."""
    (tmp_path / "model.py").write_text(
        "import onelaunch as ol\nassert callable(ol.fuse) and ol.nn.Linear\nraise SystemExit(f'has {ol.__all__[0]}')\n"
    )
    _, err = start("explain", "model.py:build", "--input", "2x8").communicate()
    assert "cannot be made: SystemExit: has CheckpointError" in err
