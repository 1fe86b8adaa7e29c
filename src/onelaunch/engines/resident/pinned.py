"""Host memory that a running kernel and the host share: the kernel reports progress in it, the host asks it to stop.

It is PyTorch's pinned memory: page-locked, and mapped into the device under unified addressing. The kernel writes a word with
`st.release.sys`, and the host reads it in `array` while the kernel still runs. In the other direction, the kernel reads with
`ld.acquire.sys`. A word (4 or 8 bytes, aligned) is read and written as a whole.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver

from onelaunch.nvrtc.launch import context_of


class MappedArray:
    """Zero at first. The memory is freed with this object, even while a kernel uses it: wait for the kernel first."""

    def __init__(self, count: int, dtype: npt.DTypeLike, device: torch.device) -> None:
        """`dtype` may be a structure, such as [("step", "<u4"), ("stop", "<u4")], for named words."""
        with context_of(device):
            self._memory = torch.zeros(count * np.dtype(dtype).itemsize, dtype=torch.uint8, pin_memory=True)
            status, address = driver.cuMemHostGetDevicePointer(self._memory.data_ptr(), 0)
        assert status == driver.CUresult.CUDA_SUCCESS, status
        self.array = self._memory.numpy().view(dtype)
        self.address = int(address)  # for the device
