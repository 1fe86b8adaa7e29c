"""From IR to functions in memory: LLVM's code generator, the loader, and the cache of object code.

No optimisation passes run before code generation. The emitters write vectorised code in SSA form with addresses computed
outside the loops, and the generator's own passes (loop strength reduction, scheduling) do the rest: the same speed, at half
the time to compile. llvmlite is imported inside the functions, when the first run starts.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onelaunch.engines.cpu.cache import OBJECTS, key_of
from onelaunch.engines.cpu.code.kernel import Kernel, Unit
from onelaunch.engines.cpu.code.units import text_of
from onelaunch.engines.cpu.plan.target import Target

_ONCE = threading.Lock()
_READY: set[str] = set()


def _initialize(what: str) -> None:
    import llvmlite.binding as llvm

    with _ONCE:
        if what in _READY:
            return
        if what == "native":
            llvm.initialize_native_target()
            llvm.initialize_native_asmprinter()
        else:
            llvm.initialize_all_targets()
            llvm.initialize_all_asmprinters()
        _READY.add(what)


def machine_for(target: Target, *, foreign: bool = False) -> Any:
    """LLVM's target machine; `foreign` for a target whose code this machine cannot run."""
    import llvmlite.binding as llvm

    _initialize("all" if foreign else "native")
    found = llvm.Target.from_triple(target.triple)
    return found.create_target_machine(cpu=target.cpu, features=target.features, opt=2, jit=True)


def object_code(text: str, machine: Any) -> bytes:
    import llvmlite.binding as llvm

    return machine.emit_object(llvm.parse_assembly(text))


def _loader(triple: str) -> Any:
    """An LLVM engine that loads object code and compiles nothing."""
    import llvmlite.binding as llvm

    _initialize("native")
    # Its machine needs no processor: code is compiled by another one. LLVM frees this one together with the engine.
    machine = llvm.Target.from_triple(triple).create_target_machine(jit=True)
    empty = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(empty, machine)
    engine.remove_module(empty)  # otherwise it is compiled with the first object: 0.9 ms to set up LLVM's passes
    return engine


class Library:
    """Units in memory, loaded from the cache or compiled when they are first asked for. Their code stays until the library is
    dropped. One library per process and target serves all sessions (`library`)."""

    def __init__(self, target: Target, cache_folder: Path | None) -> None:
        """`cache_folder`: None neither reads nor writes a cache."""
        self._target, self._cache_folder = target, cache_folder
        self._engine = _loader(target.triple)
        self._keys: dict[Unit, str] = {}  # of the units in memory
        self._addresses: dict[tuple[Unit, str], int] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def _machine(self) -> Any:
        """To compile with; a process that finds all code on disk makes none."""
        return machine_for(self._target)

    def load(self, units: Iterable[Unit]) -> list[Unit]:
        """Bring units into memory. Returns those that had to be compiled."""
        import llvmlite.binding as llvm

        compiled = []
        with self._lock:
            missing = [unit for unit in dict.fromkeys(units) if unit not in self._keys]
            for unit in missing:
                key = key_of(unit, self._target)
                code = OBJECTS.load(self._cache_folder, key) if self._cache_folder else None
                if code is None:
                    compiled.append(unit)
                    code = object_code(text_of(unit, self._target, f"_{key[:16]}"), self._machine)
                    if self._cache_folder:
                        OBJECTS.store(self._cache_folder, key, code)
                self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
                self._keys[unit] = key
            if missing:  # LLVM crashes where it has nothing to link
                self._engine.finalize_object()
        return compiled

    def address(self, unit: Unit, kernel: Kernel | str) -> int:
        """The address of a public function of a loaded unit."""
        name = kernel if isinstance(kernel, str) else kernel.name
        found = self._addresses.get((unit, name))
        if found is None:
            symbol = f"{name}_{self._keys[unit][:16]}"
            found = self._addresses[unit, name] = self._engine.get_function_address(symbol)
            assert found, symbol
        return found

    def function(self, unit: Unit, kernel: Kernel | str, *argument_types: type) -> Any:
        """A public function as a Python function. Calling it releases the GIL."""
        return ctypes.CFUNCTYPE(None, *argument_types)(self.address(unit, kernel))


@functools.cache
def library(target: Target, cache_folder: Path | None) -> Library:
    """The library of this process for a target and a cache folder; `library.cache_clear()` drops all."""
    return Library(target, cache_folder)
