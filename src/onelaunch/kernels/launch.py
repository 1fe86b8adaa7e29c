"""Launches a kernel again without Triton's per-call work.

`kernel[grid](...)` binds, classifies and hashes every argument on each call, and asks the driver about every pointer. Here the
compiled kernel is kept under what it was specialised for (sizes, options, each tensor's type and alignment), and its
launcher is called with plain addresses. A profiler's launch hook and the interpreter take the plain way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

# (function, device, every argument or its type) -> compiled kernel. A program has few shapes; a sweep over many starts anew.
_compiled: dict[tuple[Any, ...], Any] = {}
_MAX_COMPILED = 4096
_runtime = knobs.runtime


class _Mode(threading.local):
    only_compiling = False


_mode = _Mode()


@contextmanager
def compiling() -> Iterator[None]:
    """What this thread launches in here is compiled and loaded, and not run: a graph may then be captured before anything
    has run."""
    _mode.only_compiling = True
    try:
        yield
    finally:
        _mode.only_compiling = False


def call(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """`kernel[grid](...)`, Triton's own way, or its compilation alone; the compiled kernel."""
    if not _mode.only_compiling:
        return kernel[grid](*arguments, **options)
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    assert compiled.run  # asking for it loads the kernel
    return compiled


def cdiv(a: int, b: int) -> int:
    """Triton's own `cdiv` costs microseconds a call on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def needs_triton() -> bool:
    """Whether a launch must go Triton's own way: it is only compiled, or a profiler wants to see it (a chain of hooks in
    Triton 3.6, a single one or None before)."""
    hook = _runtime.launch_enter_hook
    return _mode.only_compiling or bool(getattr(hook, "calls", hook))


def launch_options(num_warps: int, num_stages: int, launch_pdl: bool) -> dict[str, Any]:
    """Of a call through Triton: made only where it is called, not on every launch of compiled code."""
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
    """Runs `kernel(*tensors, *values, *sizes, *constants)`: its parameters come in that order, the first tensor given.

    Values are floats, or integers the kernel declares `do_not_specialize` with a type; sizes are integers it may be
    specialised on; constants are its constexpr parameters. `launch_pdl`: it may start while the kernel before it ends.
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
    # By the kernel's function: a kernel's own hash takes microseconds.
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
    """A kernel that was compiled for these arguments, addresses in place of tensors, on the current device."""
    across = grid[1] if len(grid) > 1 else 1
    compiled.run(
        grid[0], across, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
    )  # fmt: skip
