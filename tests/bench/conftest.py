from __future__ import annotations

from collections.abc import Iterator

import pytest

from onelaunch.bench.case import REGISTRY
from onelaunch.bench.run import select


class Clock:
    """Time that passes only when someone sleeps, or a little when it is asked for: a busy machine does not disturb it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("energy", "measure"):
        monkeypatch.setattr(f"onelaunch.bench.{module}.time", clock)
    return clock


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
