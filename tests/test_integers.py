from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from onelaunch.integers import ceil_div, clamp, next_power_of_2, round_up


@given(a=st.integers(0, 10**30), b=st.integers(1, 10**20))
def test_division_rounds_up(a, b):
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b
    assert round_up(a, b) == ceil_div(a, b) * b


@given(n=st.integers(-3, 2**70))
def test_next_power_of_2(n):
    power = next_power_of_2(n)
    assert power.bit_count() == 1
    assert power >= n
    assert power == 1 or power // 2 < n


def test_clamp():
    assert [clamp(2, value, 5) for value in (-math.inf, 1, 2, 4, 5, 9)] == [2, 2, 2, 4, 5, 5]
