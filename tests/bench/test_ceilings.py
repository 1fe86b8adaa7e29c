from __future__ import annotations

from onelaunch.bench.ceilings import Ceilings


def test_the_longer_of_two_floors_counts():
    ceilings = Ceilings()
    ceilings.measured["cpu"] = {"copy": 100.0, "fp32": 1000.0}
    assert ceilings.seconds("cpu", 50, 100, "fp32") == 0.5
    assert ceilings.seconds("cpu", 50, 1000, "fp32") == 1.0
    assert ceilings.seconds("cpu", None, None, "fp32") is None
