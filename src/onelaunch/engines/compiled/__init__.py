"""The compiled engine: any nn.Module on a CUDA device, compiled with the kernels of level 2 and captured as one CUDA graph.

It runs the eager engine's step, with forward, loss and backward compiled by `torch.compile` and our patterns. The model's
dropout modules draw the masks of `onelaunch.rng` inside the compiled code.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from onelaunch.device import cuda_unavailable_reason
from onelaunch.engines.contract import Run
from onelaunch.engines.eager import ENGINE as EAGER

if TYPE_CHECKING:
    from onelaunch.engines.compiled.session import CompiledSession


class CompiledEngine:
    name = "compiled"

    def unavailable_reason(self, device: torch.device) -> str:
        if reason := cuda_unavailable_reason(device):
            return reason
        return "" if importlib.util.find_spec("triton") is not None else "Triton is not installed"

    def unsupported_reason(self, run: Run) -> str:
        reason = EAGER.unsupported_reason(run)
        if reason:
            return reason
        if run.spec.memory != "plan":
            return f"memory={run.spec.memory!r}, and it has only 'plan'"
        if run.loader is not None:
            return "batches come from a DataLoader"
        if any(part.device != run.device for part in (run.x, *run.more_x)):
            return "rows are in host memory"
        if run.network is not None and run.network.functional_dropouts:
            return "the model calls F.dropout, whose masks it cannot number"
        from onelaunch.engines.compiled.probe import probe_reason

        return probe_reason(run)

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> CompiledSession:
        from onelaunch.engines.compiled.session import CompiledSession

        return CompiledSession(run, state)


ENGINE = CompiledEngine()
