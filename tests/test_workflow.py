"""The workflow file calls make targets that exist, on the Python versions that pyproject.toml allows."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from onelaunch.version import VERSION
from tests.conftest import ROOT

yaml: Any = import_module("yaml")  # it has no type annotations
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())


def test_every_command_is_a_make_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands
    assert {command.split()[1] for command in commands} <= targets
    assert all(command.startswith("make ") for command in commands)


def test_the_matrix_covers_the_systems_and_versions() -> None:
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    assert [name.split("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]


def test_the_citation_names_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION
