"""From IR to functions in memory: LLVM's passes, its code generator, and the loader.

The passes are few: the emitters write what they mean, so that vectorisers and unrollers only cost time. llvmlite is imported
here, when the first run starts.
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
    """LLVM's description of a target; `foreign` for one that this machine cannot run."""
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
    """The functions of a plan, from the cache or made now. Keeps the code in memory as long as it lives."""

    def __init__(self, plan: Plan, place: Path | None) -> None:
        """`place`: the cache's folder; None to leave the disk alone."""
        import llvmlite.binding as llvm

        machine = machine_for(plan.target)
        key = key_of(plan.settings, plan.target)
        code = OBJECTS.load(place, key) if place else None
        self.cached = code is not None
        if code is None:
            code = object_code(Program(plan).text, machine)
            if place:
                OBJECTS.store(place, key, code)
        # A target machine belongs to one engine (LLVM frees it with it), so every Native has its own.
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def function(self, name: str, *argument_types: type) -> Any:
        """A public function of the program; calling it releases Python's lock."""
        address = self._engine.get_function_address(name)
        assert address, name
        return ctypes.CFUNCTYPE(None, *argument_types)(address)
