"""The arena: one block of memory for everything a run needs, allocated before the first step."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.settings import HYPERPARAMETERS
from onelaunch.engines.cpu.plan.target import CACHE_LINE
from onelaunch.integers import round_up
from onelaunch.operating_system import prefer_huge_pages

HUGE_PAGE = 2**21


def _memory(size: int) -> np.ndarray[Any, Any]:
    """Zeroed bytes, on huge pages where the system provides them: wide products then have fewer TLB misses."""
    if size < HUGE_PAGE // 8:
        raw = np.zeros(size + 4096, np.uint8)
        start = -raw.ctypes.data % 4096
        return raw[start : start + size]
    mapping = mmap.mmap(-1, size + HUGE_PAGE)
    prefer_huge_pages(mapping)
    raw = np.frombuffer(mapping, np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    return raw[start : start + size]


class Arena:
    """The memory of a plan, followed by `rows` entries for the row order; its buffers are found by name."""

    def __init__(self, plan: Plan, rows: int, memory: np.ndarray[Any, Any] | None = None) -> None:
        """`memory`: used instead of fresh memory (tests put guard pages around it)."""
        self.plan = plan
        size = self.size_for(plan, rows)
        self.is_zero = memory is None  # as the operating system provides it, until a run begins
        self.memory = _memory(size) if memory is None else memory
        assert len(self.memory) == size
        assert self.memory.ctypes.data % CACHE_LINE == 0
        self.address = self.memory.ctypes.data
        self.order = self.memory[plan.size :].view(np.int32)

    @staticmethod
    def size_for(plan: Plan, rows: int) -> int:
        # The row indices of a batch are read one vector at a time, also those past the end of the last batch.
        return plan.size + round_up(4 * (round_up(rows, plan.lanes) + plan.rows), CACHE_LINE)

    def view(self, name: str, dtype: Any = np.float32, shift: int = 0) -> np.ndarray[Any, Any]:
        """A buffer by name. `shift` is added to its offset in bytes: an optimizer state is stored that far behind."""
        buffer = self.plan.buffers[name]
        return self.memory[buffer.offset + shift : buffer.offset + shift + buffer.size].view(dtype)

    def set_words(self, buffer: str, *words: int) -> None:
        self.view(buffer, np.int64)[: len(words)] = words

    def set_hyperparameters(self, **values: float) -> None:
        view = self.view("hyperparameters")
        for name, value in values.items():
            view[HYPERPARAMETERS.index(name)] = value

    def write(self, buffer: str, tensor: np.ndarray[Any, Any], shift: int = 0) -> None:
        """Store a vector, or a matrix `[outputs, inputs]` of PyTorch in panels."""
        view = self.view(buffer, shift=shift)
        if not self.is_zero:
            view[:] = 0
        if tensor.ndim == 1:
            view[: len(tensor)] = tensor
            return
        outputs, inputs = tensor.shape
        for first, width in self._panels(outputs):
            panel = view[first * inputs : (first + width) * inputs].reshape(inputs, width)
            part = tensor[first : first + width]
            panel[:, : len(part)] = part.T

    def read(self, buffer: str, inputs: int, outputs: int, shift: int = 0) -> np.ndarray[Any, Any]:
        """A copy of a vector (inputs = 0), or of a matrix as PyTorch's `[outputs, inputs]`."""
        view = self.view(buffer, shift=shift)
        if not inputs:
            return view[:outputs].copy()
        result = np.empty((outputs, inputs), np.float32)
        for first, width in self._panels(outputs):
            panel = view[first * inputs : (first + width) * inputs].reshape(inputs, width)
            result[first : first + width] = panel[:, : min(width, outputs - first)].T
        return result

    def _panels(self, outputs: int) -> list[tuple[int, int]]:
        plan = self.plan
        padded = round_up(outputs, plan.lanes)
        return [(first, min(plan.panel_width, padded - first)) for first in range(0, padded, plan.panel_width)]
