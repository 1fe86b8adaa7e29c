"""The eager engine: PyTorch autograd, for any nn.Module on any device. The reference for the other engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from onelaunch.device import cuda_capability
from onelaunch.engines.contract import Run
from onelaunch.run.distributed import world

if TYPE_CHECKING:
    from onelaunch.engines.eager.session import EagerSession


class EagerEngine:
    name = "eager"

    def unavailable_reason(self, device: torch.device) -> str:
        return ""

    def unsupported_reason(self, run: Run) -> str:
        spec, cuda = run.spec, run.device.type == "cuda"
        if spec.precision in ("tf32", "fp16") and not cuda:
            return f"precision={spec.precision!r} needs a CUDA device; on this one pass 'fp32' or 'bf16'"
        if spec.precision in ("tf32", "bf16") and cuda and cuda_capability(run.device) < (8, 0):
            return f"precision={spec.precision!r} needs a GPU of compute capability 8.0 or more; pass 'fp32' or 'fp16'"
        if spec.memory == "stream" and cuda and torch.cuda.get_allocator_backend() != "cudaMallocAsync":
            return (
                "memory='stream' needs PyTorch's cudaMallocAsync backend: set "
                "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync before Python starts, or pass 'plan' or 'caching'"
            )
        if run.loader is not None and world().size > 1:
            return "several processes cannot share a DataLoader: pass arrays"
        if min(spec.batch_size, spec.rows) < world().size:
            return (
                f"batch_size={spec.batch_size} leaves some of {world().size} processes without rows: pass a larger one"
            )
        return ""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> EagerSession:
        from onelaunch.engines.eager.session import EagerSession

        return EagerSession(run, state)


ENGINE = EagerEngine()
