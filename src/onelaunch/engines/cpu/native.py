"""From IR to functions in memory: LLVM's code generator, the loader, and the cache of object code.

No optimisation passes run before code generation. The emitters write vectorised code in SSA form with addresses computed
outside the loops, and the generator's own passes (loop strength reduction, scheduling) do the rest: the same speed, at half
the time to compile. llvmlite is imported inside the functions, when the first run starts.
"""

from __future__ import annotations

import ctypes
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


class Native:
    """The functions of units, loaded from the cache or compiled. The code stays in memory as long as this object lives."""

    def __init__(self, units: Iterable[Unit], target: Target, cache_folder: Path | None) -> None:
        """`cache_folder`: None neither reads nor writes a cache."""
        self.compiled: list[Unit] = []  # those that were not in the cache
        self._engines = {unit: self._load(unit, target, cache_folder) for unit in units}
        self._addresses: dict[tuple[Unit, str], int] = {}

    def _load(self, unit: Unit, target: Target, cache_folder: Path | None) -> Any:
        import llvmlite.binding as llvm

        machine = machine_for(target)
        key = key_of(unit, target)
        code = OBJECTS.load(cache_folder, key) if cache_folder else None
        if code is None:
            self.compiled.append(unit)
            code = object_code(text_of(unit, target), machine)
            if cache_folder:
                OBJECTS.store(cache_folder, key, code)
        # LLVM frees the target machine together with the engine, so every engine has its own.
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine

    def address(self, unit: Unit, kernel: Kernel | str) -> int:
        """The address of a public function of a unit."""
        name = kernel if isinstance(kernel, str) else kernel.name
        found = self._addresses.get((unit, name))
        if found is None:
            found = self._addresses[unit, name] = self._engines[unit].get_function_address(name)
            assert found, name
        return found

    def function(self, unit: Unit, kernel: Kernel | str, *argument_types: type) -> Any:
        """A public function as a Python function. Calling it releases the GIL."""
        return ctypes.CFUNCTYPE(None, *argument_types)(self.address(unit, kernel))
