from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def one_torch_thread(one_thread: None) -> None:
    """At these sizes PyTorch's own threads only slow the reference down; the tests choose the engine's partitions."""


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of compiled code for the whole test run, all workers included: a network is compiled once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cpu_code"
    folder.mkdir(exist_ok=True)
    return folder
