from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.report.scale import Scale, fitted, is_wide

finite = st.floats(-1e6, 1e6, allow_subnormal=False)
positive = st.floats(1e-9, 1e9)


@settings(max_examples=60)
@given(st.lists(finite, min_size=1, max_size=20))
def test_a_linear_scale_holds_its_values_and_has_round_ticks(values):
    scale = fitted(values, 0, 100)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(ticks)


@settings(max_examples=60)
@given(st.lists(positive, min_size=1, max_size=20))
def test_a_logarithmic_scale_holds_its_values(values):
    scale = fitted(values, 0, 100, log=True)
    assert all(-1e-6 <= scale(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks)


def test_coordinates_of_known_values():
    scale = Scale(1, 100, 0, 200, log=True)
    assert [round(scale(v)) for v in (1, 10, 100)] == [0, 100, 200]
    assert Scale(0, 10, 50, 0)(2.5) == 37.5


@pytest.mark.parametrize(
    ("values", "wide"), [([1.0, 2.0], False), ([0.1, 2.0], True), ([0.0, 2.0], False), ([math.nan], False)]
)
def test_a_logarithmic_axis_is_for_values_far_apart(values, wide):
    assert is_wide(values) == wide


def test_ticks_of_a_narrow_logarithmic_axis_are_round():
    assert fitted([1.9, 2.3], 0, 100, log=True).ticks() == pytest.approx([1.8, 2.0, 2.2, 2.4])
