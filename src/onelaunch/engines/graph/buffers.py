"""The three sources of a run's buffers: one planned arena, PyTorch's caching allocator, or the driver's stream-ordered one.

A step calls `take` before a kernel and `release` after the last kernel that needs a buffer, so the sources are exchangeable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Protocol

import torch

from onelaunch.engines.graph.plan.memory import Layout
from onelaunch.engines.graph.plan.operations import BufferSpec, StepPlan
from onelaunch.errors import UnsupportedError

TYPES = {
    "uint8": torch.uint8, "int16": torch.int16, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip


class Buffers(Protocol):
    calls: int  # calls to the allocator since the run began
    peak_bytes: int

    def take(self, name: str) -> torch.Tensor:
        """The buffer of this name, allocated if it does not exist; its contents are undefined then."""

    def release(self, names: Iterable[str]) -> None:
        """This step does not need these buffers any more."""

    def close(self) -> None:
        """Free all buffers."""


class Arena:
    """memory="plan": one allocation, made before the first step."""

    def __init__(self, step: StepPlan, layout: Layout, device: torch.device) -> None:
        self.bytes = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self.calls, self.peak_bytes = 1, layout.nbytes
        self._views = {
            name: _view(self.bytes[layout.offsets[name] :], buffer)
            for name, buffer in step.buffers.items()
            if name in layout.offsets
        }

    def take(self, name: str) -> torch.Tensor:
        return self._views[name]

    def release(self, names: Iterable[str]) -> None:
        pass

    def close(self) -> None:
        self._views.clear()


class Pool:
    """memory="caching": each buffer comes from PyTorch's allocator when it is needed, and is freed after its last use."""

    def __init__(self, step: StepPlan, device: torch.device) -> None:
        self._step, self._device = step, device
        self._live: dict[str, torch.Tensor] = {}
        self.calls = self.peak_bytes = self._bytes = 0

    def take(self, name: str) -> torch.Tensor:
        if name not in self._live:
            buffer = self._step.buffers[name]
            self._live[name] = self._make(buffer)
            self.calls += 1
            self._bytes += buffer.nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return self._live[name]

    def _make(self, buffer: BufferSpec) -> torch.Tensor:
        return torch.empty(buffer.shape, dtype=TYPES[buffer.dtype], device=self._device)

    def _free(self, tensor: torch.Tensor) -> None:
        """PyTorch frees a tensor when its last reference is dropped."""

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            tensor = self._live.pop(name, None)
            if tensor is not None:
                self._bytes -= self._step.buffers[name].nbytes
                self._free(tensor)

    def close(self) -> None:
        self.release(list(self._live))


class DriverPool(Pool):
    """memory="stream": `cuMemAllocAsync` and `cuMemFreeAsync`, which a captured graph contains as nodes.

    With `ordered=False`: `cuMemAlloc` and `cuMemFree` for every buffer, which wait for the device.
    """

    def __init__(self, step: StepPlan, device: torch.device, *, ordered: bool = True) -> None:
        super().__init__(step, device)
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedError("memory='stream' needs the CUDA driver's library: pass memory='plan'") from error
        self._ordered = ordered
        torch.cuda.current_stream(device)  # creates a context

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            raise UnsupportedError(f"memory='stream': {name} failed with CUDA error {status}: pass memory='plan'")

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)

    def _make(self, buffer: BufferSpec) -> torch.Tensor:
        address = ctypes.c_uint64(0)
        size = ctypes.c_size_t(max(buffer.nbytes, 1))
        if self._ordered:
            self._call("cuMemAllocAsync", ctypes.byref(address), size, self._stream())
        else:
            self._call("cuMemAlloc_v2", ctypes.byref(address), size)
        return _view(torch.as_tensor(_DriverMemory(address.value, buffer.nbytes), device=self._device), buffer)

    def _free(self, tensor: torch.Tensor) -> None:
        address = ctypes.c_uint64(tensor.data_ptr())
        if self._ordered:
            self._call("cuMemFreeAsync", address, self._stream())
        else:
            self._call("cuMemFree_v2", address)


class _DriverMemory:
    """Memory from the driver, which PyTorch wraps in a tensor without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def _view(source: torch.Tensor, buffer: BufferSpec) -> torch.Tensor:
    return source[: buffer.nbytes].view(TYPES[buffer.dtype]).view(buffer.shape)


def make_buffers(memory: str, step: StepPlan, layout: Layout, device: torch.device) -> Buffers:
    match memory:
        case "plan":
            return Arena(step, layout, device)
        case "caching":
            return Pool(step, device)
        case "malloc":  # only for `onelaunch bench memory`
            return DriverPool(step, device, ordered=False)
    return DriverPool(step, device)
