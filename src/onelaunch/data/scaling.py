"""Robust scaling of features and standardisation of regression targets, in float64, for networks that compute in float32.

A feature is centred on its median and divided by its interquartile range, then clipped smoothly to (-3, 3): outliers keep
their order but cannot dominate a network's inputs. A feature whose quartiles are equal, such as a rare flag, is divided by
half its range instead. The idea is from "Better by Default" (Holzmüller et al., NeurIPS 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LIMIT = 3.0  # scaled features lie strictly between -LIMIT and LIMIT
MAX_QUANTILE_ROWS = 10_000  # quantiles of longer columns are those of this many evenly spaced rows
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class FeatureScaling:
    """`clip((x - center) * factor)`, per column; a column with factor 0 becomes 0 everywhere."""

    center: np.ndarray  # float64 [features]
    factor: np.ndarray  # float64 [features]

    @classmethod
    def fit(cls, x: np.ndarray, weight: np.ndarray | None = None) -> FeatureScaling:
        """The scaling of the columns of x [rows, features]. A row of weight 2 counts as two rows. NaN is left out.

        A column without a single finite number gets center 0 and factor 0.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            low, high = np.fmin.reduce(x, axis=0), np.fmax.reduce(x, axis=0)
            quartiles = _quantiles(x, weight)
            spread = (quartiles[2] - quartiles[0]).astype(np.float64)
            width = np.where(spread > 0, spread, (high.astype(np.float64) - low) / 2)
            factor = np.where(np.isfinite(width) & (width > 0), 1 / np.where(width > 0, width, 1), 0.0)
        center = quartiles[1].astype(np.float64)
        usable = np.isfinite(center) & np.isfinite(factor)
        return cls(np.where(usable, center, 0.0), np.where(usable, factor, 0.0))

    def transform(self, x: np.ndarray) -> np.ndarray:
        """float32 [rows, features]; NaN, the mark of a missing value, becomes 0, which is the median."""
        with np.errstate(over="ignore"):
            z = (x - self.center) * self.factor
            z /= np.sqrt(1 + np.square(z / LIMIT))
        return np.nan_to_num(z, copy=False, nan=0.0).astype(np.float32)


@dataclass(frozen=True)
class TargetScaling:
    """`(y - mean) / deviation`, per target."""

    mean: np.ndarray  # float64 [targets]
    deviation: np.ndarray  # float64 [targets], never 0

    @classmethod
    def fit(cls, y: np.ndarray, weight: np.ndarray | None = None) -> TargetScaling:
        """Weighted mean and standard deviation of the columns of y [rows, targets]; a constant target gets deviation 1."""
        mean = np.average(y, axis=0, weights=weight)
        deviation = np.sqrt(np.average(np.square(y - mean), axis=0, weights=weight))
        return cls(mean, np.where(np.isfinite(deviation) & (deviation > 0), deviation, 1.0))

    def transform(self, y: np.ndarray) -> np.ndarray:
        """float32 [rows, targets]."""
        return ((y - self.mean) / self.deviation).astype(np.float32)

    def inverse(self, y: np.ndarray) -> np.ndarray:
        """float64 [rows, targets], in the units of the targets."""
        return y * self.deviation + self.mean


def _quantiles(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """The quartiles of each column as values that occur in it (no interpolation), [3, features]; NaN for no numbers."""
    if len(x) > MAX_QUANTILE_ROWS:
        rows = np.linspace(0, len(x) - 1, MAX_QUANTILE_ROWS).astype(np.intp)
        x, weight = x[rows], None if weight is None else weight[rows]
    missing = np.isnan(x)
    if weight is None and not missing.any():
        return np.quantile(x, QUARTILES, axis=0, method="inverted_cdf")
    order = np.argsort(x, axis=0)  # NaN last
    ordered = np.take_along_axis(x, order, axis=0)
    weights = np.ones(len(x)) if weight is None else weight
    counts = np.where(np.take_along_axis(missing, order, axis=0), 0.0, weights[order])
    cumulative = np.cumsum(counts, axis=0)
    # As in NumPy's "inverted_cdf": the first value whose cumulative weight reaches the fraction.
    found = [np.argmax(cumulative >= fraction * cumulative[-1] * (1 - 1e-12), axis=0) for fraction in QUARTILES]
    return np.stack([np.take_along_axis(ordered, rows[None], axis=0)[0] for rows in found])
