from __future__ import annotations

import time

import pytest
import torch

from onelaunch.bench.energy import joules, watts
from onelaunch.bench.gpu_state import current_gpu


class Meter:
    """A counter as a card's: each call of `work` takes 30 mJ, shown only when 100 mJ have come together."""

    def __init__(self) -> None:
        self.calls = 0

    def work(self) -> None:
        self.calls += 1
        time.sleep(0.001)

    def read(self) -> int:
        return 30 * self.calls // 100 * 100


def test_a_coarse_counter_gives_the_energy_of_a_unit():
    meter = Meter()
    found = joules(meter.work, units=10, seconds=0.2, counter=meter.read, settle=lambda: None)
    assert found == pytest.approx(0.003, rel=0.05)


def test_power_is_energy_over_time():
    meter = Meter()
    begin = time.perf_counter()
    found = watts(meter.work, seconds=0.2, counter=meter.read, settle=lambda: None)
    mean = 0.030 * meter.calls / (time.perf_counter() - begin)
    assert found == pytest.approx(mean, rel=0.15)


def test_a_counter_that_stands_still_or_is_missing_gives_none(monkeypatch):
    monkeypatch.setattr("onelaunch.bench.energy.GIVE_UP_SECONDS", 0.05)
    for reading in (7, None):
        assert joules(lambda: None, units=1, seconds=0.1, counter=lambda: reading, settle=lambda: None) is None  # noqa: B023


def test_without_a_gpu_there_is_no_state():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert current_gpu() is None


@pytest.mark.gpu
def test_the_card_tells_its_clocks_and_energy():
    gpu = current_gpu()
    assert gpu is not None
    state = gpu.state()
    assert state["sm_mhz"] > 0
    assert isinstance(state["held_back_by"], list)
    assert gpu.driver().split(".")[0].isdigit()
    x = torch.randn(4096, 4096, device="cuda")
    used = joules(lambda: x @ x, units=1, seconds=0.3, counter=gpu.millijoules)
    assert used is None or 0 < used < 100  # a product of 0.14 TFLOP; a card without the counter says so
