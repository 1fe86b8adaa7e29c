from __future__ import annotations

from collections.abc import Iterator

import pytest

from onelaunch.fuse import calls
from onelaunch.fuse.verdict import force


@pytest.fixture
def every_chain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fuse whatever can be, whether it pays or not, and run the ops of level 1 on the CPU too."""
    monkeypatch.setattr(calls, "plain_elsewhere", False)
    with force(True):
        yield
