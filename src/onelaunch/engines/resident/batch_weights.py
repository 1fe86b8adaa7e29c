"""The summed row weights of every batch of a launch, computed on the device before its steps are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onelaunch.integers import ceil_div, clamp

if TYPE_CHECKING:
    from onelaunch.nvrtc.launch import LoadedKernel

WARPS, MAX_BLOCKS = 8, 1024  # of `sum_weights`; a warp takes a step


class BatchWeights:
    def __init__(self, steps: int, kernel: LoadedKernel) -> None:
        """`steps`: the most of one launch, of all members together. `kernel`: `sum_weights` of cuda/batch_weights.cuh."""
        self.sums = torch.zeros(max(1, steps), dtype=torch.float64, device=kernel.device)
        self._kernel = kernel

    def launch(self, stream: torch.cuda.Stream, steps: int, argument: bytes, members: int = 1) -> None:
        """Queue the kernel for `steps` steps of each member; `argument` is that of the kernel that trains."""
        blocks = clamp(1, ceil_div(steps, WARPS), max(1, MAX_BLOCKS // members))
        self._kernel.launch(stream, grid=blocks * members, block=32 * WARPS, args=[argument])
