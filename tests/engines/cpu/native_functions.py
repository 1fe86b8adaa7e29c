"""Small native functions for tests: emitted, compiled and called on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from onelaunch.engines.cpu.code.emit import Function, Module
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.engines.cpu.native import machine_for, object_code
from onelaunch.engines.cpu.plan.target import Target, host, named
from onelaunch.integers import round_up

Array = np.ndarray[Any, Any]
Emit = Callable[[Function, Value], Value]


def runnable_targets() -> list[Target]:
    """This machine first, then narrower ones whose code it can run."""
    triple = host().triple
    found = [host()]
    if triple.startswith("x86_64"):
        found.append(named(triple, "x86-64"))
        if host().lanes >= 8:
            found.append(named(triple, "haswell", ("avx2", "fma")))
    return found


class Loaded:
    """The public functions of a module, in memory as long as this object lives."""

    def __init__(self, module: Module) -> None:
        import llvmlite.binding as llvm

        machine = machine_for(module.target)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(object_code(module.text(), machine)))
        self._engine.finalize_object()

    def function(self, name: str, *types: type) -> Callable[..., None]:
        return ctypes.CFUNCTYPE(None, *types)(self._engine.get_function_address(name))


class VectorFunctions:
    """Elementwise functions by name, compiled together."""

    def __init__(self, emitters: Mapping[str, Emit], target: Target) -> None:
        module = Module(target)
        for name, emit in emitters.items():
            module.function(name, "ptr %x, ptr %y, i64 %n", partial(_over, emit), public=True)
        self._loaded = Loaded(module)

    def __call__(self, name: str, x: Array) -> Array:
        """The function's float32 values at every element of x."""
        padded = np.resize(x.astype(np.float32), round_up(len(x), 16))
        y = np.empty_like(padded)
        function = self._loaded.function(name, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function(padded.ctypes.data, y.ctypes.data, len(padded))
        return y[: len(x)]


def _over(emit: Emit, f: Function) -> None:
    f.loop(f["n"], lambda i: f.store(emit(f, f.vload(f["x"], i)), f["y"], i), step=f.lanes)
