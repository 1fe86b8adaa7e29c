"""Launches a kernel again without Triton's per-call work.

`kernel[grid](...)` binds, classifies and hashes every argument on each call: about as long as two whole PyTorch ops. Here the
compiled kernel is kept under what it was specialised for (sizes, options, and each tensor's type and alignment), and
its C launcher is called directly. A profiler's launch hook, another Triton layout or the interpreter take the plain way.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

# (kernel, device, every argument or its type) -> compiled kernel. A program has few shapes; a sweep over many starts anew.
_compiled: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 4096


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[torch.Tensor | None, ...],
    values: tuple[int | float, ...],
    sizes: tuple[int, ...],
    constants: tuple[Any, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
) -> None:
    """Runs `kernel(*tensors, *values, *sizes, *constants)`: its parameters come in that order.

    Values are floats, or integers the kernel declares `do_not_specialize` with a type; sizes are integers it may be
    specialised on; constants are its constexpr parameters.
    """
    device = next(tensor for tensor in tensors if tensor is not None).device
    if device.type != "cuda" or not isinstance(kernel, JITFunction):
        kernel[grid](*tensors, *values, *sizes, *constants, num_warps=num_warps, num_stages=num_stages)
        return
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, tensors, values, sizes, constants, num_warps=num_warps, num_stages=num_stages)
        return
    kinds = tuple([None if t is None else (t.dtype, t.data_ptr() % 16) for t in tensors])
    key = (kernel, index, kinds, sizes, constants, num_warps, num_stages)
    compiled = _compiled.get(key)
    if compiled is None or knobs.runtime.launch_enter_hook is not None:
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = kernel[grid](*tensors, *values, *sizes, *constants, num_warps=num_warps, num_stages=num_stages)
        return
    compiled.run(
        grid[0],
        grid[1] if len(grid) > 1 else 1,
        grid[2] if len(grid) > 2 else 1,
        torch._C._cuda_getCurrentRawStream(index),
        compiled.function,
        compiled.packed_metadata,
        None,
        None,
        None,
        *tensors,
        *values,
        *sizes,
        *constants,
    )
