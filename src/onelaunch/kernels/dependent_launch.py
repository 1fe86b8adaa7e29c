"""Programmatic dependent launch: a kernel may start before the kernel before it has ended, on sm_90 and later.

A kernel launched with `launch_pdl` is loaded onto the chip while programs of the previous kernel still run. It must call
`wait_for_previous_kernel` before it touches memory, whatever that kernel is. The previous kernel may call `allow_next_kernel`
to let it start before its own end.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous_kernel(OVERLAP: tl.constexpr):
    """Wait until the previous kernel has ended; required before reading what it wrote.

    Where all kernels of a chain wait, the results of still earlier kernels are complete without waiting. They must be read past
    L1 (".cg"), which may hold an older version.
    """
    if OVERLAP:
        gdc_wait()


@triton.jit
def allow_next_kernel(OVERLAP: tl.constexpr):
    """Let the next kernel be loaded onto the chip, once all programs of this one have called this or ended.

    Call it after the main loop where a multiprocessor runs more than one program in turn: earlier, the next kernel's programs
    would take registers and shared memory from those still to come. Call it first in a kernel whose programs are all resident
    at once. A kernel that reads before it waits must not follow such a kernel directly: the kernel before both may not have
    ended.
    """
    if OVERLAP:
        gdc_launch_dependents()


@functools.cache
def overlaps_on(device: int) -> bool:
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device may be launched with `launch_pdl`."""
    return overlaps_on(tensor.get_device())
