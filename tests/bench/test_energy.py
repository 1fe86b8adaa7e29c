from __future__ import annotations

import pytest
import torch

from onelaunch.bench.case import Work
from onelaunch.bench.energy import joules, watts
from onelaunch.bench.gpu_state import current_gpu
from onelaunch.bench.measure import measure
from tests.bench.conftest import Clock


class Card:
    """A device with a queue: 500 W when busy, 100 W when idle. Its counter moves every 40 ms and is slow to read."""

    def __init__(self, clock: Clock, call: float = 0.002, reading: float = 0.003) -> None:
        self.clock, self.call, self.reading = clock, call, reading
        self.begin = clock.perf_counter()
        self.free_at = self.begin
        self.busy: list[tuple[float, float]] = []

    def work(self) -> None:
        start = max(self.clock.perf_counter(), self.free_at)
        self.free_at = start + self.call
        self.busy.append((start, self.free_at))

    def mark(self) -> Work:
        until = self.free_at
        return lambda: self.clock.sleep(max(0.0, until - self.clock.perf_counter()))

    def read(self) -> int:
        self.clock.sleep(self.reading)
        tick = self.begin + (self.clock.perf_counter() - self.begin) // 0.04 * 0.04
        working = sum(max(0.0, min(end, tick) - start) for start, end in self.busy)
        return int(1e3 * (100 * (tick - self.begin) + 400 * working))


def test_energy_per_unit_is_that_of_a_busy_card(clock):
    """2 ms at 500 W for 10 units, although each reading takes longer than a call."""
    card = Card(clock)
    found = joules(card.work, units=10, call_seconds=0.002, seconds=0.4, counter=card.read, mark=card.mark)
    assert found == pytest.approx(0.1, rel=0.2)


def test_power_of_work_that_synchronises_itself(clock):
    card = Card(clock, call=0.03)

    def waits() -> None:
        card.work()
        card.mark()()

    assert watts(waits, seconds=0.4, counter=card.read, mark=card.mark) == pytest.approx(480, rel=0.2)


def test_no_energy_without_a_moving_counter(monkeypatch, clock):
    monkeypatch.setattr("onelaunch.bench.energy.GIVE_UP_SECONDS", 0.05)
    for reading in (7, None):
        card = Card(clock, call=0.001)
        found = joules(card.work, units=1, call_seconds=0.001, seconds=0.1, counter=lambda: reading, mark=card.mark)  # noqa: B023
        assert found is None


def test_no_gpu_state_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert current_gpu() is None


@pytest.mark.gpu
def test_the_card_reports_clocks_and_energy():
    gpu = current_gpu()
    assert gpu is not None
    state = gpu.state()
    assert state["sm_mhz"] > 0
    assert isinstance(state["held_back_by"], list)
    assert gpu.driver().split(".")[0].isdigit()
    x = torch.randn(4096, 4096, device="cuda")
    (timing,) = measure({"product": lambda: x @ x}, units=1, cuda=True, seconds=0.1, repeats=5)[0].values()
    used = joules(lambda: x @ x, units=1, call_seconds=timing.median, seconds=0.3, counter=gpu.millijoules)
    assert used is None or 50 < used / timing.median < 1500  # watts; None for a card without the counter
