from __future__ import annotations

from collections.abc import Iterator

import pytest

from onelaunch.bench.case import REGISTRY
from onelaunch.bench.run import select


@pytest.fixture
def temporary_cases() -> Iterator[None]:
    """Cases registered in a test are gone after it."""
    select("all")  # loads the real cases, once
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here starts a thread pool whose spinning would have to be waited out."""
    monkeypatch.setattr("onelaunch.bench.measure.SETTLE_SECONDS", 0.01)
