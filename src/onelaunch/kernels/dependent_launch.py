"""A kernel's start over the end of the kernel before it (programmatic dependent launch), on chips that can: sm_90 and later.

Launched with `launch_pdl`, a kernel is brought onto the chip while programs of the one before it still run. It must call
`begin` before it touches memory, whatever that kernel was; that one may call `release` to let it come sooner than its end.
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
    """Before a kernel reads what the kernel before it wrote: wait for that one's end.

    Where all kernels of a chain wait, what still earlier ones wrote is there without waiting; it is then read past L1 (".cg"),
    which may hold an older version.
    """
    if OVERLAP:
        gdc_wait()


@triton.jit
def allow_next_kernel(OVERLAP: tl.constexpr):
    """The next kernel may be brought onto the chip, once all programs of this one have said so or ended.

    After a program's main loop where more than one lives on a multiprocessor: sooner, the next kernel's would take registers
    and shared memory that they could use. First thing in a kernel whose programs are all there at once; one that reads before
    it calls `begin` must not follow it directly, since what came before this kernel may not have ended.
    """
    if OVERLAP:
        gdc_launch_dependents()


@functools.cache
def overlaps_on(device: int) -> bool:
    return device >= 0 and torch.cuda.get_device_capability(device) >= (9, 0)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device may be launched so."""
    return overlaps_on(tensor.get_device())
