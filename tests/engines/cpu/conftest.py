from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def one_torch_thread(one_thread: None) -> None:
    """PyTorch's own threads only slow the reference down at these sizes; the engine's shares are chosen by the tests."""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of cached code for the whole session: tests of the same network compile it once."""
    return tmp_path_factory.mktemp("cpu_code")
