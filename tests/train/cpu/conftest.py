from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """PyTorch's own threads only slow the reference down at these sizes; the engine's shares are chosen by the tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of cached code for the whole session: tests of the same network compile it once."""
    return tmp_path_factory.mktemp("cpu_code")
