"""What the compiled kernels of a call take of a multiprocessor: registers, shared memory, spills, occupancy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

WARP = 32
REGISTER_UNIT = 256  # registers are given to a warp in units of this many
SHARED_RESERVED = 1024  # bytes a block, for the system


@dataclass(frozen=True)
class KernelResources:
    name: str
    registers: int  # a thread
    spills: int  # bytes a thread
    shared_bytes: int  # a block
    warps: int  # a block
    occupancy: float  # warps resident on a multiprocessor, of those it has room for


def resources_of(run: Callable[[], object]) -> list[KernelResources]:
    """The Triton kernels that `run` launches on the current CUDA device, each once, in order."""
    from triton import knobs

    from onelaunch.kernels import launch

    launched: list[Any] = []

    def note(metadata: Any) -> None:
        launched.append(metadata.get()["function"])

    # With a hook there, every launch goes through Triton itself, which tells the hook.
    before = knobs.runtime.launch_enter_hook
    chain = getattr(before, "add", None)
    if chain is not None:
        chain(note)
    else:
        knobs.runtime.launch_enter_hook = note
    try:
        run()
        torch.cuda.synchronize()
    finally:
        if chain is not None:
            before.remove(note)
        else:
            knobs.runtime.launch_enter_hook = before
    by_function = {compiled.function: compiled for compiled in launch._compiled.values()}
    return [_resources(by_function[function]) for function in dict.fromkeys(launched) if function in by_function]


def _resources(compiled: Any) -> KernelResources:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    share = occupancy(
        compiled.n_regs, shared, warps,
        registers=getattr(properties, "regs_per_multiprocessor", 65536),
        shared_memory=getattr(properties, "shared_memory_per_multiprocessor", 228 * 1024),
        threads=getattr(properties, "max_threads_per_multi_processor", 2048),
    )  # fmt: skip
    return KernelResources(compiled.metadata.name, compiled.n_regs, compiled.n_spills, shared, warps, share)


def occupancy(
    registers_per_thread: int, shared_bytes: int, warps: int, *, registers: int, shared_memory: int, threads: int
) -> float:
    """Resident warps over those there is room for, by registers, shared memory and threads."""
    most_warps = threads // WARP
    unit = -(-registers_per_thread * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = registers // (max(1, unit) * warps)
    by_shared = shared_memory // (shared_bytes + SHARED_RESERVED)
    blocks = min(by_registers, by_shared, most_warps // warps, 32)
    return blocks * warps / most_warps
