"""The vector functions against float64, over the whole range; NaN and the ends included."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.engines.cpu.native import machine_for, object_code
from onelaunch.engines.cpu.plan.target import Target, host, named

ULP = 2.0**-23


def load(text: str, target: Target, name: str, *types: type) -> tuple[Any, Any]:
    import llvmlite.binding as llvm

    machine = machine_for(target)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(object_code(text, machine)))
    engine.finalize_object()
    return ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(name)), engine


def evaluate(emit: Callable[[Function, Value], Value], x: np.ndarray[Any, Any], target: Target) -> np.ndarray[Any, Any]:
    module = Module(target)

    def make(f: Function) -> None:
        f.loop(f["n"], lambda i: f.store(emit(f, f.vload(f["x"], i)), f["y"], i), step=f.lanes)

    module.function("apply", "ptr %x, ptr %y, i64 %n", make, public=True)
    function, _engine = load(module.text(), target, "apply", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    padded = np.resize(x.astype(np.float32), -(-len(x) // 16) * 16)
    y = np.empty_like(padded)
    function(padded.ctypes.data, y.ctypes.data, len(padded))
    return y[: len(x)]


def targets() -> list[Target]:
    triple = host().triple
    found = [host()]
    if triple.startswith("x86_64"):
        found.append(named(triple, "x86-64"))
        if host().lanes >= 8:
            found.append(named(triple, "haswell", ("avx2", "fma")))
    return found


def erf(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return torch.erf(torch.from_numpy(x)).numpy()


WIDE = np.concatenate([np.linspace(-30, 30, 40001), np.geomspace(1e-30, 30, 5001), -np.geomspace(1e-30, 30, 5001)])
UNIT = np.concatenate([np.linspace(0, 1, 20001), np.geomspace(1e-30, 1, 5001)])
# name: (emitter, float64 reference, inputs, relative error allowed in units of 2**-23, absolute error allowed)
CASES: dict[str, tuple[Any, Any, np.ndarray[Any, Any], float, float]] = {
    "exp": (vector_math.exp, np.exp, np.linspace(-87, 88.5, 50001), 2, 0),
    "exp_nonpositive": (vector_math.exp_nonpositive, np.exp, np.linspace(-86, 0, 50001), 2, 0),
    "log": (vector_math.log, np.log, np.geomspace(1e-30, 1e30, 50001), 2, 1e-8),
    "log1p_unit": (vector_math.log1p_unit, np.log1p, UNIT, 3, 0),
    "tanh": (vector_math.tanh, np.tanh, WIDE, 2, 0),
    "erf": (vector_math.erf, erf, WIDE, 5, 0),
    "sigmoid": (vector_math.sigmoid, lambda x: 1 / (1 + np.exp(-x)), WIDE, 3, 0),
    "root": (vector_math.root, np.sqrt, np.geomspace(1e-36, 1e36, 20001), 2, 0),
    "divide": (lambda f, x: vector_math.divide(f, f.constant(3.0), x), lambda x: 3 / x, np.geomspace(1e-30, 1e30, 20001), 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, target: Target) -> None:
    emit, reference, x, ulps, absolute = CASES[name]
    x = x.astype(np.float32)
    want = reference(x.astype(np.float64))
    error = np.abs(evaluate(emit, x, target) - want)
    worst = np.argmax(error - absolute - ulps * ULP * np.abs(want))
    allowed = absolute + ulps * ULP * np.abs(want[worst])
    assert error[worst] <= allowed, f"x={x[worst]}: {error[worst]:.2e} off, {allowed:.2e} allowed"


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("root", "divide")])
def test_nan_stays_nan(name: str) -> None:
    assert np.isnan(evaluate(CASES[name][0], np.array([np.nan] * 16), host())).all()


def test_ends_of_the_range() -> None:
    infinite = np.array([-np.inf, np.inf, -1000, 1000] * 4)
    for emit, ends in (
        (vector_math.tanh, (-1, 1)), (vector_math.erf, (-1, 1)), (vector_math.sigmoid, (0, 1)),
    ):  # fmt: skip
        got = evaluate(emit, infinite, host())
        np.testing.assert_allclose(got[:4], [ends[0], ends[1]] * 2, atol=1e-7, rtol=2 * ULP)
