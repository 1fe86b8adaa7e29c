"""Robust scaling and standardisation against their definitions, with outliers, constants, missing values and weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from onelaunch.data.scaling import LIMIT, MAX_QUANTILE_ROWS, FeatureScaling, TargetScaling


def test_median_and_interquartile_range_then_a_smooth_clip():
    x = np.random.default_rng(0).standard_cauchy((401, 3)) * [1, 1e-6, 1e9] + [0, 5, -1e12]
    low, middle, high = np.quantile(x, (0.25, 0.5, 0.75), axis=0, method="inverted_cdf")
    z = (x - middle) / (high - low)
    scaled = FeatureScaling.fit(x).transform(x)
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[:, :3], z / np.sqrt(1 + (z / LIMIT) ** 2), rtol=1e-5, atol=1e-6)
    assert np.abs(scaled).max() <= LIMIT


def test_ramps_rise_over_one_octile_each():
    x = np.random.default_rng(0).lognormal(size=(200, 2)) * [1, 0]
    scaling = FeatureScaling.fit(x)
    assert scaling.outputs == 2 + 8
    edges = np.quantile(x[:, 0], np.arange(9) / 8, method="inverted_cdf")
    edges[0] = x[:, 0].min()
    expected = [np.interp(x[:, 0], (low, high), (-0.5, 0.5)) for low, high in itertools.pairwise(edges)]
    np.testing.assert_allclose(scaling.transform(x)[:, 2:], np.stack(expected, 1), atol=1e-6)
    assert FeatureScaling.fit(x[:49]).outputs == 2, "too few rows for ramps"
    few_values = np.random.default_rng(0).integers(0, 4, (200, 1)).astype(float)
    assert FeatureScaling.fit(few_values).outputs == 1
    assert scaling.transform(np.full((1, 2), np.nan)).tolist() == [[0.0] * 10]


def test_a_rare_flag_a_constant_and_an_empty_column():
    x = np.zeros((100, 3))
    x[7, 0] = 1
    x[:, 1] = 1e300
    x[:, 2] = np.nan
    scaled = FeatureScaling.fit(x).transform(x)
    assert scaled[7, 0] == pytest.approx(2 / np.sqrt(1 + 4 / 9))
    assert np.count_nonzero(scaled) == 1


def test_a_missing_value_is_the_median():
    x = np.array([[1.0], [np.nan], [2.0], [9.0]])
    scaling = FeatureScaling.fit(x)
    assert scaling.center == [2]
    assert scaling.transform(x)[1] == 0


@pytest.mark.parametrize("missing", [False, True])
def test_a_weight_of_two_is_a_row_twice(missing):
    random = np.random.default_rng(1)
    x = random.normal(size=(60, 4))
    if missing:
        x[random.random(x.shape) < 0.2] = np.nan
    weight = random.integers(1, 5, 60)
    weighted, repeated = FeatureScaling.fit(x, weight.astype(float)), FeatureScaling.fit(x.repeat(weight, axis=0))
    np.testing.assert_array_equal(weighted.center, repeated.center)
    np.testing.assert_array_equal(weighted.factor, repeated.factor)
    y = random.normal(size=(60, 2))
    ours, theirs = TargetScaling.fit(y, weight), TargetScaling.fit(y.repeat(weight, axis=0))
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-12)
    np.testing.assert_allclose(ours.deviation, theirs.deviation, rtol=1e-12)


def test_quantiles_of_a_long_table_come_from_some_of_its_rows_and_the_range_from_all():
    x = np.zeros((MAX_QUANTILE_ROWS * 3, 1))
    x[1] = 4  # not among the evenly spaced rows
    assert FeatureScaling.fit(x).factor == [0.5]


def test_targets_return_in_their_own_units():
    y = np.random.default_rng(2).normal(size=(50, 2)) * [1e6, 1e-6] + [1e7, 3]
    scaling = TargetScaling.fit(y)
    scaled = scaling.transform(y)
    assert scaled.std(axis=0) == pytest.approx([1, 1], rel=1e-5)
    np.testing.assert_allclose(scaling.inverse(scaled.astype(np.float64)), y, rtol=1e-5)
    assert TargetScaling.fit(np.full((3, 1), 7.0)).deviation == [1]
