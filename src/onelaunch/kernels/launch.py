"""Launch a compiled kernel again without Triton's per-call work.

`kernel[grid](...)` binds, classifies and hashes every argument on each call, and queries the driver about every pointer. Here
the compiled kernel is kept under a key of what it was specialised for (sizes, options, each tensor's dtype and alignment), and
its launcher is called with addresses. The interpreter and launches seen by a profiler's hook go through Triton.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

# (function, device, every argument or its type) -> compiled kernel. Few shapes are the rule; at the limit it starts empty.
_compiled: dict[tuple[Any, ...], Any] = {}
_MAX_COMPILED = 4096
_runtime = knobs.runtime


class _Mode(threading.local):
    only_compiling = False


_mode = _Mode()


@contextmanager
def compiling() -> Iterator[None]:
    """Inside the context, launches of this thread compile and load the kernel but do not run it.

    A CUDA graph can then be captured before anything has run.
    """
    _mode.only_compiling = True
    try:
        yield
    finally:
        _mode.only_compiling = False


def call(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """Launch through Triton, `kernel[grid](...)`, or only compile inside `compiling()`; returns the compiled kernel."""
    if not _mode.only_compiling:
        return kernel[grid](*arguments, **options)
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    assert compiled.run  # reading the attribute loads the kernel
    return compiled


def needs_triton() -> bool:
    """Whether a launch must go through Triton: it is only to be compiled, or a profiler has set a launch hook.

    The hook is a chain of hooks in Triton 3.6, and a single one or None before.
    """
    hook = _runtime.launch_enter_hook
    return _mode.only_compiling or bool(getattr(hook, "calls", hook))


def launch_options(num_warps: int, num_stages: int, launch_pdl: bool) -> dict[str, Any]:
    """The keyword options of a launch through Triton; not built on launches of compiled code."""
    return {"num_warps": num_warps, "num_stages": num_stages} | ({"launch_pdl": True} if launch_pdl else {})


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
    launch_pdl: bool = False,
) -> Any:
    """Run `kernel(*tensors, *values, *sizes, *constants)`; its parameters are in that order, and the first tensor is not None.

    Values are floats, or integers that the kernel declares `do_not_specialize` with a type. Sizes are integers that it may be
    specialised on. Constants are its constexpr parameters. With `launch_pdl` it may start before the previous kernel has ended.
    Returns the compiled kernel, for `launch_again`; None from the interpreter.
    """
    first = tensors[0]
    assert first is not None
    device = first.get_device()
    if device < 0 or not isinstance(kernel, JITFunction):
        kernel[grid](*tensors, *values, *sizes, *constants, **launch_options(num_warps, num_stages, launch_pdl))
        return None
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            options = launch_options(num_warps, num_stages, launch_pdl)
            return launch(kernel, grid, tensors, values, sizes, constants, **options)
    pointers: list[Any] = []
    kinds: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            kinds.append(None)
        else:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            kinds.append((tensor.dtype, pointer & 15) if pointer & 15 else tensor.dtype)
    # Keyed by the kernel's Python function: hashing the kernel object takes microseconds.
    key = (kernel.fn, device, *kinds, sizes, constants, num_warps, num_stages, launch_pdl)
    compiled = _compiled.get(key)
    if compiled is None or needs_triton():
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        options = launch_options(num_warps, num_stages, launch_pdl)
        compiled = _compiled[key] = call(kernel, grid, *tensors, *values, *sizes, *constants, **options)
        return compiled
    stream = torch._C._cuda_getCurrentRawStream(device)
    launch_again(compiled, grid, stream, (*pointers, *values, *sizes, *constants))
    return compiled


def launch_again(compiled: Any, grid: tuple[int, ...], stream: int, arguments: tuple[Any, ...]) -> None:
    """Launch a kernel that was compiled for such arguments on the current device; tensors are given as addresses."""
    across = grid[1] if len(grid) > 1 else 1
    compiled.run(
        grid[0], across, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
    )  # fmt: skip
