from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def every_chain() -> Iterator[None]:
    """Fuse whatever can be, whether it pays or not."""
    from onelaunch.fuse.verdict import force

    with force(True):
        yield
