"""From IR to functions in memory: LLVM's passes, its code generator, and the loader.

Only a few passes run. The emitters write vectorised and unrolled code, so LLVM's vectorisers and unrollers would only cost
time. llvmlite is imported inside the functions, when the first run starts.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

from onelaunch.engines.cpu.cache import OBJECTS, key_of
from onelaunch.engines.cpu.code.program import Program
from onelaunch.engines.cpu.plan.plan import Plan
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

    module = llvm.parse_assembly(text)
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=1)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


class Native:
    """The functions of a plan, loaded from the cache or compiled. The code stays in memory as long as this object lives."""

    def __init__(self, plan: Plan, cache_folder: Path | None) -> None:
        """`cache_folder`: None neither reads nor writes a cache."""
        import llvmlite.binding as llvm

        machine = machine_for(plan.target)
        key = key_of(plan.settings, plan.target)
        code = OBJECTS.load(cache_folder, key) if cache_folder else None
        self.cached = code is not None
        if code is None:
            code = object_code(Program(plan).text, machine)
            if cache_folder:
                OBJECTS.store(cache_folder, key, code)
        # LLVM frees the target machine together with the engine, so every Native has its own.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def function(self, name: str, *argument_types: type) -> Any:
        """A public function of the program. Calling it releases the GIL."""
        address = self._engine.get_function_address(name)
        assert address, name
        return ctypes.CFUNCTYPE(None, *argument_types)(address)
