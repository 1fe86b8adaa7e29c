from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from onelaunch.bench.case import REGISTRY
from onelaunch.bench.contenders import EAGER, TorchLoop
from onelaunch.bench.run import select
from onelaunch.engines.contract import Run
from tests import pairwise


class Clock:
    """A clock that advances when `sleep` is called, and a little when it is read: independent of how busy the machine is."""

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
    """Remove the cases that a test registers."""
    select("all")  # loads the real cases
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a millisecond: no test looks at real times. No test starts a thread pool whose spinning must be waited for."""
    for module in ("measure", "sizes", "ceilings"):
        monkeypatch.setattr(f"onelaunch.bench.{module}.SETTLE_SECONDS", 0.0)
    monkeypatch.setattr("onelaunch.bench.measure.SAMPLE_SECONDS", 1e-3)
    monkeypatch.setattr("onelaunch.bench.ceilings.COPIED_BYTES", {"cpu": 2**20, "cuda": 2**20})


@pytest.fixture(autouse=True)
def brief_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for all cores, to see how many others use, takes milliseconds."""
    monkeypatch.setattr("onelaunch.bench.busy.SECONDS", 0.005)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile fails at once."""

    def make_ready(self: TorchLoop, run: Run) -> None:
        if self.name != EAGER:
            raise RuntimeError("no compiler\nfor this test")

    monkeypatch.setattr(TorchLoop, "_make_ready", make_ready)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces, guards and recompiles, but generates code, which takes 30 s, only with --all-cases."""
    compile, backend = torch.compile, "inductor" if pairwise.ALL_CASES else "aot_eager"

    def quick(function: Callable[..., Any], mode: str, dynamic: bool) -> Callable[..., Any]:
        return compile(function, backend=backend, mode=mode, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", quick)
