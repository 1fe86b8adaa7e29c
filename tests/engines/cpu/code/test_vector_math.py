"""The vector functions against float64, over the whole range; NaN and the ends included."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.plan.target import Target, host
from tests.engines.cpu.native_functions import Array, VectorFunctions, runnable_targets

ULP = 2.0**-23


def erf(x: Array) -> Array:
    return torch.erf(torch.from_numpy(x)).numpy()


WIDE = np.concatenate([np.linspace(-30, 30, 40001), np.geomspace(1e-30, 30, 5001), -np.geomspace(1e-30, 30, 5001)])
UNIT = np.concatenate([np.linspace(0, 1, 20001), np.geomspace(1e-30, 1, 5001)])
NONPOSITIVE = np.concatenate([np.linspace(-86, 0, 50001), -np.geomspace(1e-30, 1, 5001)])
# name: (emitter, float64 reference, inputs, relative error allowed in units of 2**-23, absolute error allowed)
CASES: dict[str, tuple[Any, Any, Array, float, float]] = {
    "exp": (vector_math.exp, np.exp, np.linspace(-87, 88.5, 50001), 2, 0),
    "exp_nonpositive": (vector_math.exp_nonpositive, np.exp, np.linspace(-86, 0, 50001), 2, 0),
    "expm1_nonpositive": (vector_math.expm1_nonpositive, np.expm1, NONPOSITIVE, 2, 0),
    "exp_minus_magnitude": (vector_math.exp_minus_magnitude, lambda x: np.exp(-abs(x)), WIDE, 2, 0),
    "log": (vector_math.log, np.log, np.geomspace(1e-30, 1e30, 50001), 2, 1e-8),
    "log1p_unit": (vector_math.log1p_unit, np.log1p, UNIT, 3, 0),
    "tanh": (vector_math.tanh, np.tanh, WIDE, 2, 0),
    "erf": (vector_math.erf, erf, WIDE, 5, 0),
    "sigmoid": (vector_math.sigmoid, lambda x: 1 / (1 + np.exp(-x)), WIDE, 3, 0),
    "root": (vector_math.root, np.sqrt, np.geomspace(1e-36, 1e36, 20001), 2, 0),
    "divide": (lambda f, x: vector_math.divide(f, f.constant(3.0), x), lambda x: 3 / x, np.geomspace(1e-30, 1e30, 20001), 2, 0),
}  # fmt: skip


@functools.cache
def compiled(target: Target) -> VectorFunctions:
    return VectorFunctions({name: case[0] for name, case in CASES.items()}, target)


@pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, target: Target) -> None:
    _, reference, x, ulps, absolute = CASES[name]
    x = x.astype(np.float32)
    expected = reference(x.astype(np.float64))
    error = np.abs(compiled(target)(name, x) - expected)
    worst = np.argmax(error - absolute - ulps * ULP * np.abs(expected))
    allowed = absolute + ulps * ULP * np.abs(expected[worst])
    assert error[worst] <= allowed, f"x={x[worst]}: {error[worst]:.2e} off, {allowed:.2e} allowed"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("root", "divide")])
def test_nan_stays_nan(name: str) -> None:
    assert np.isnan(compiled(host())(name, np.array([np.nan] * 16))).all()


@pytest.mark.parametrize(
    ("name", "ends"),
    {"tanh": (-1, 1), "erf": (-1, 1), "sigmoid": (0, 1), "exp_minus_magnitude": (0, 0)}.items(),
)
def test_ends_of_the_range(name: str, ends: tuple[int, int]) -> None:
    got = compiled(host())(name, np.array([-np.inf, np.inf, -1000, 1000] * 4))
    np.testing.assert_allclose(got[:4], [ends[0], ends[1]] * 2, atol=1e-7, rtol=2 * ULP)
