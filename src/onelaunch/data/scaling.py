"""Robust scaling of features and standardisation of regression targets, in float64, for networks that compute in float32.

A feature is centred on its median and divided by its interquartile range, then clipped smoothly to (-3, 3): outliers keep
their order but cannot dominate a network's inputs. A feature whose quartiles are equal, such as a rare flag, is divided by
half its range instead. The idea is from "Better by Default" (Holzmüller et al., NeurIPS 2024).

Where there are rows enough, a feature with many values also gets one ramp per octile: it rises from -0.5 at the lower end of
the octile to 0.5 at its upper end. A network learns steps and bends from ramps as easily as a tree does. They are the
piecewise-linear encoding of "On Embeddings for Numerical Features" (Gorishniy et al., NeurIPS 2022), centred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelaunch.errors import DataError

LIMIT = 3.0  # scaled features lie strictly between -LIMIT and LIMIT
MAX_QUANTILE_ROWS = 10_000  # quantiles of longer columns are those of this many evenly spaced rows
OCTILES = tuple(number / 8 for number in range(1, 8))
MIN_RAMPS = 4  # a feature with fewer different octiles gets none
MIN_ROWS_PER_RAMPED_FEATURE = 50  # with fewer rows, ramps overfit (docs/lab-notebook/tables.md)


@dataclass(frozen=True)
class FeatureScaling:
    """`clip((x - center) * factor)` per column (0 everywhere for factor 0), then the ramps."""

    center: np.ndarray  # float64 [features]
    factor: np.ndarray  # float64 [features]
    ramp_column: np.ndarray  # int64 [ramps]: the column of each ramp
    ramp_low: np.ndarray  # float64 [ramps]: where it begins
    ramp_slope: np.ndarray  # float64 [ramps]: 1 / its width

    @classmethod
    def fit(cls, x: np.ndarray, weight: np.ndarray | None = None) -> FeatureScaling:
        """The scaling of the columns of x [rows, features]. A row of weight 2 counts as two rows. NaN is left out.

        A column without a single finite number gets center 0 and factor 0.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            low = np.fmin.reduce(x, axis=0).astype(np.float64)
            high = np.fmax.reduce(x, axis=0).astype(np.float64)
            octiles = _octiles(x, weight).astype(np.float64)
            spread = octiles[5] - octiles[1]
            width = np.where(spread > 0, spread, (high - low) / 2)
            factor = np.where(np.isfinite(width) & (width > 0), 1 / np.where(width > 0, width, 1), 0.0)
        usable = np.isfinite(octiles[3]) & np.isfinite(factor)
        rows = len(x) if weight is None else float(weight.sum())
        ramps = _ramps(np.concatenate([low[None], octiles, high[None]]), usable & (factor > 0), rows)
        return cls(np.where(usable, octiles[3], 0.0), np.where(usable, factor, 0.0), *ramps)

    @property
    def outputs(self) -> int:
        """The number of scaled values per row."""
        return len(self.center) + len(self.ramp_column)

    def transform(self, x: np.ndarray) -> np.ndarray:
        """float32 [rows, outputs]; NaN, the mark of a missing value, becomes 0."""
        features = len(self.center)
        scaled = np.empty((len(x), self.outputs), np.float32)
        with np.errstate(over="ignore"):
            z = (x - self.center) * self.factor
            scaled[:, :features] = z / np.sqrt(1 + np.square(z / LIMIT))
            for index, column in enumerate(self.ramp_column):  # one at a time: all of them would take much memory
                ramp = (x[:, column] - self.ramp_low[index]) * self.ramp_slope[index]
                scaled[:, features + index] = np.clip(ramp, 0, 1) - 0.5
        return np.nan_to_num(scaled, copy=False, nan=0.0)

    def to_json(self) -> dict[str, list[float]]:
        return {name: getattr(self, name).tolist() for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> FeatureScaling:
        """The scaling that `to_json` described; raises KeyError, TypeError or ValueError if it did not."""
        kinds = {"ramp_column": np.int64}
        found = cls(*(np.array(content[name], kinds.get(name, np.float64)) for name in cls.__dataclass_fields__))
        features, ramps = found.center.shape, found.ramp_column.shape
        shapes = [found.factor.shape, found.ramp_low.shape, found.ramp_slope.shape]
        if (
            shapes != [features, ramps, ramps]
            or not ((found.ramp_column >= 0) & (found.ramp_column < features[0])).all()
        ):
            raise ValueError("the lengths of its lists do not match")
        return found


def _ramps(edges: np.ndarray, usable: np.ndarray, rows: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Column, beginning and slope of each ramp, from the edges of the octiles [9, features]; none if rows are too few."""
    found = {int(column): np.unique(edges[:, column]) for column in np.flatnonzero(usable)}
    chosen = {column: values for column, values in found.items() if len(values) > MIN_RAMPS}
    if rows < MIN_ROWS_PER_RAMPED_FEATURE * len(chosen):
        chosen = {}
    column = np.concatenate([np.empty(0, np.int64), *(np.full(len(v) - 1, column) for column, v in chosen.items())])
    low = np.concatenate([np.empty(0), *(values[:-1] for values in chosen.values())])
    return column, low, np.concatenate([np.empty(0), *(1 / np.diff(values) for values in chosen.values())])


@dataclass(frozen=True)
class TargetScaling:
    """`(y - mean) / deviation`, per target."""

    mean: np.ndarray  # float64 [targets]
    deviation: np.ndarray  # float64 [targets], never 0

    @classmethod
    def fit(cls, y: np.ndarray, weight: np.ndarray | None = None) -> TargetScaling:
        """Weighted mean and standard deviation of the columns of y [rows, targets]; a constant target gets deviation 1.

        Raises DataError for targets so large that their sum is infinite.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.average(y, axis=0, weights=weight)
            deviation = np.sqrt(np.average(np.square(y - mean), axis=0, weights=weight))
            largest = np.abs(y - mean).max(axis=0)
            unknown = np.isinf(deviation) | (deviation == 0) & (
                largest > 0
            )  # squares of 1e300 overflow, of 1e-300 vanish
            if unknown.any():
                parts = np.average(np.square((y - mean) / np.where(largest > 0, largest, 1)), axis=0, weights=weight)
                deviation = np.where(unknown, largest * np.sqrt(parts), deviation)
        if not (np.isfinite(mean).all() and np.isfinite(deviation).all()):
            raise DataError(
                f"y has values up to {np.abs(y).max():.3g}, whose sum is not a finite number: scale it down"
            )
        return cls(mean, np.where(deviation > 0, deviation, 1.0))

    def transform(self, y: np.ndarray) -> np.ndarray:
        """float32 [rows, targets]."""
        return ((y - self.mean) / self.deviation).astype(np.float32)

    def inverse(self, y: np.ndarray) -> np.ndarray:
        """float64 [rows, targets], in the units of the targets."""
        return y * self.deviation + self.mean


def _octiles(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """The octiles of each column as values that occur in it (no interpolation), [7, features]; NaN for no numbers."""
    if len(x) > MAX_QUANTILE_ROWS:
        rows = np.linspace(0, len(x) - 1, MAX_QUANTILE_ROWS).astype(np.intp)
        x, weight = x[rows], None if weight is None else weight[rows]
    missing = np.isnan(x)
    if weight is None and not missing.any():
        return np.quantile(x, OCTILES, axis=0, method="inverted_cdf")
    order = np.argsort(x, axis=0)  # NaN last
    ordered = np.take_along_axis(x, order, axis=0)
    weights = np.ones(len(x)) if weight is None else weight
    counts = np.where(np.take_along_axis(missing, order, axis=0), 0.0, weights[order])
    cumulative = np.cumsum(counts, axis=0)
    # As in NumPy's "inverted_cdf": the first value whose cumulative weight reaches the fraction.
    found = [np.argmax(cumulative >= fraction * cumulative[-1] * (1 - 1e-12), axis=0) for fraction in OCTILES]
    return np.stack([np.take_along_axis(ordered, rows[None], axis=0)[0] for rows in found])
