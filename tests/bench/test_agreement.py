from __future__ import annotations

import numpy as np
import pytest

from onelaunch.bench.agreement import widest_gap


def curve(seed: int, steps: int = 2000, noise: float = 0.3) -> np.ndarray:
    """A falling loss with the noise of batches, of which all runs over the same rows share a part."""
    level = 2.3 / (1 + np.arange(steps) / 100)
    shared = np.random.default_rng(99).normal(size=steps)
    own = np.random.default_rng(seed).normal(size=steps)
    return level * (1 + noise * (0.8 * shared + 0.3 * own)).clip(0.05)


@pytest.mark.parametrize("seed", range(1, 11))
def test_runs_that_differ_by_noise_agree(seed):
    gap = widest_gap(curve(0), curve(seed))
    assert gap.agrees
    assert gap.relative <= gap.bound


@pytest.mark.parametrize("wrong", ["higher", "from the middle on", "nan"])
def test_runs_that_differ_by_more_disagree(wrong):
    other = curve(1)
    if wrong == "higher":
        other = other * 1.1
    elif wrong == "from the middle on":
        other[1000:] *= 1.15
    else:
        other[1500:] = np.nan
    gap = widest_gap(curve(0), other)
    assert not gap.agrees
    if wrong == "from the middle on":
        assert gap.first_step >= 1000


def test_equal_curves_have_no_gap_and_short_ones_can_be_compared():
    assert widest_gap([1.0], [1.0]).relative == 0
    gap = widest_gap(curve(0, 37), curve(0, 37))
    assert (gap.relative, gap.agrees) == (0, True)
    assert not widest_gap(curve(0, 37), curve(0, 37) * 1.5).agrees
    tail = curve(0, 37)
    tail[30:] *= 3  # the last stretch takes the rest
    assert widest_gap(curve(0, 37), tail).last_step == 36
