"""A cubin on a device: the resources of its kernel, how many blocks fit at once, and launches on a PyTorch stream.

`cuda.core` loads and owns the code. Attributes and launches use the driver API directly, where one configuration serves both
the occupancy query and the launch. Everything happens in the device's primary context, which PyTorch uses too.
Import this only if `compile.unavailable_reason()` is empty.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import ObjectCode

from onelaunch.nvrtc.compile import Cubin

PORTABLE_CLUSTER = 8  # blocks: larger clusters need an attribute of the kernel
DYNAMIC_SHARED = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
LARGE_CLUSTERS = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED


class CudaError(RuntimeError):
    """A call of the driver failed. The message has its name and the driver's description."""


class LoadedKernel:
    """A kernel on one device. Its code is unloaded with this object, so the object must outlive its launches."""

    def __init__(self, code: ObjectCode, name: str, device: torch.device) -> None:
        self.device = device
        self._code = code
        self._kernel = code.get_kernel(name)
        attributes = self._kernel.attributes
        self.registers: int = attributes.num_regs  # per thread
        self.local_bytes: int = attributes.local_size_bytes  # per thread: stack frame and spills
        self.shared_bytes: int = attributes.shared_size_bytes  # per block: static, without the dynamic part of a launch
        self.max_threads: int = attributes.max_threads_per_block

    def max_active_clusters(self, *, block: int, cluster: int = 1, shared_bytes: int = 0) -> int:
        """How many clusters of `cluster` blocks (blocks, if 1) the device holds at once; 0 if not even one.

        The answer for a MIG slice is that of the slice. Other processes do not count: they share the device in time.
        """
        with context_of(self.device):
            if not self._allow(shared_bytes, cluster):
                return 0
            if cluster == 1:
                status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, block, shared_bytes)
                _check("cuOccupancyMaxActiveBlocksPerMultiprocessor", status)
                return blocks * torch.cuda.get_device_properties(self.device).multi_processor_count
            config = _config(0, cluster, block, cluster, shared_bytes, cooperative=False)
            status, clusters = driver.cuOccupancyMaxActiveClusters(self._function, config)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE:
            return 0
        _check("cuOccupancyMaxActiveClusters", status)
        return clusters

    def launch(
        self,
        stream: torch.cuda.Stream,
        *,
        grid: int,
        block: int,
        cluster: int = 1,
        shared_bytes: int = 0,
        cooperative: bool = False,
        args: Sequence[int | float | bytes],
    ) -> None:
        """Queue `grid` blocks of `block` threads, in clusters of `cluster` blocks. `cooperative`: all at once, or an error.

        An int is passed as 64 bits, so that `Tensor.data_ptr()` is a pointer; a float as 32 bits; bytes as a structure.
        """
        assert grid % cluster == 0, (grid, cluster)
        with context_of(self.device):
            if not self._allow(shared_bytes, cluster):
                raise CudaError(f"a block of {self.device} cannot have {shared_bytes} bytes of dynamic shared memory")
            _launch(self._function, _config(stream.cuda_stream, grid, block, cluster, shared_bytes, cooperative), args)

    def often(self, *, block: int, cluster: int, shared_bytes: int) -> FrequentLaunch:
        at_once = self.max_active_clusters(block=block, cluster=cluster, shared_bytes=shared_bytes)
        if not at_once:
            raise CudaError(f"{self.device} holds no cluster of {cluster} blocks with {shared_bytes} bytes each")
        return FrequentLaunch(self, block, cluster, shared_bytes, at_once)

    @property
    def _function(self) -> driver.CUfunction:
        """The driver accepts the CUkernel of a library wherever it expects a CUfunction."""
        return driver.CUfunction(int(self._kernel.handle))

    def _allow(self, shared_bytes: int, cluster: int) -> bool:
        """Set the attributes that such a launch needs; False if the device has no clusters or less shared memory."""
        if cluster > 1 and torch.cuda.get_device_capability(self.device) < (9, 0):
            return False
        needed = {DYNAMIC_SHARED: shared_bytes}
        if cluster > PORTABLE_CLUSTER:
            needed[LARGE_CLUSTERS] = 1
        status, device = driver.cuCtxGetDevice()
        _check("cuCtxGetDevice", status)
        for attribute, value in needed.items():
            kernel = driver.CUkernel(int(self._kernel.handle))
            (status,) = driver.cuKernelSetAttribute(attribute, value, kernel, device)
            if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
                return False
            _check("cuKernelSetAttribute", status)
        return True


_threads = threading.local()


class FrequentLaunch:
    """A launch that is repeated in the current context (`bind_thread`); its attributes are set once.

    It may overlap with the end of the kernel before it (programmatic dependent launch): the kernel itself must wait.
    """

    def __init__(
        self, kernel: LoadedKernel, block: int, cluster: int, shared_bytes: int, clusters_at_once: int
    ) -> None:
        self.clusters_at_once = clusters_at_once
        self._kernel = kernel  # keeps its code loaded
        self._function = kernel._function
        self._config = functools.lru_cache(256)(
            lambda stream, grid: _config(stream, grid, block, cluster, shared_bytes, cooperative=False, overlap=True)
        )

    def bind_thread(self) -> None:
        """Make PyTorch's context of the device current in this thread, for good. Cheap after the first time."""
        if getattr(_threads, "device", None) != self._kernel.device:
            with context_of(self._kernel.device):
                _threads.device = self._kernel.device

    def __call__(self, stream: int, grid: int, args: Sequence[int | float | bytes]) -> None:
        _launch(self._function, self._config(stream, grid), args)


def load(cubin: Cubin, name: str, device: torch.device) -> LoadedKernel:
    """The kernel `name`, declared `extern "C"`, of a cubin, on a CUDA device."""
    with context_of(device):
        try:
            return LoadedKernel(ObjectCode.from_cubin(cubin.code, name=name), name, device)
        except Exception as error:  # the error class of cuda.core is not public
            reason = " ".join(str(error).split())
            raise CudaError(f"{name} cannot be loaded on {device}: {reason}") from error


@contextmanager
def context_of(device: torch.device) -> Iterator[None]:
    """Make PyTorch's context of `device` current in this thread, for calls of the driver."""
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().query()  # in a thread that is new to CUDA, this makes the primary context current
        yield


def _launch(function: driver.CUfunction, config: driver.CUlaunchConfig, args: Sequence[int | float | bytes]) -> None:
    values = [_c_value(value) for value in args]  # the driver copies them before it returns
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    (status,) = driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0)
    _check("cuLaunchKernelEx", status)


def _c_value(value: int | float | bytes) -> Any:
    if isinstance(value, bytes):
        return ctypes.create_string_buffer(value, len(value))
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_uint64(value)


def _config(
    stream: int, grid: int, block: int, cluster: int, shared_bytes: int, cooperative: bool, overlap: bool = False
) -> driver.CUlaunchConfig:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = driver.CUstream(stream)
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster, 1, 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _check(call: str, status: driver.CUresult) -> None:
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise CudaError(f"{call} returns {status.name}: {text.decode() if text else 'no description'}")
