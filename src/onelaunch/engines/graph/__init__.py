"""The graph engine: an MLP's step as a few fused kernels, captured once and replayed; for networks too large to be resident.

Importing this package imports no Triton; the first run does.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from onelaunch import activations
from onelaunch.device import cuda_capability, cuda_unavailable_reason
from onelaunch.engines.contract import Run
from onelaunch.engines.graph.plan.stages import stages_of
from onelaunch.engines.stages import UnsupportedNetworkError, unsupported_names

if TYPE_CHECKING:
    from onelaunch.engines.graph.session import GraphSession

MAX_ROWS, MAX_BATCH = 2**31 - 1, 2**24  # the row order is int32, and the table counts a batch's rows in float32

ACTIVATIONS = frozenset(activations.ACTIVATIONS)  # its kernels call kernels/tiles.py, which has every entry for level 1
OPTIMIZERS = frozenset({"sgd", "adam", "adamw", "rmsprop", "lion"})


class GraphEngine:
    name = "graph"

    def unavailable_reason(self, device: torch.device) -> str:
        if reason := cuda_unavailable_reason(device):
            return reason
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed: pip install triton"
        if cuda_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0 or more"
        return ""

    def unsupported_reason(self, run: Run) -> str:
        if run.network is None:
            return run.no_network_reason
        if run.uneven_updates:
            return run.uneven_updates
        if run.x.device != run.device and run.x.dtype not in (torch.float32, torch.uint8):
            return f"rows in host memory must be float32 or uint8, not {run.x.dtype}"
        if reason := unsupported_names(run.network, ACTIVATIONS, run.spec.optimizer, OPTIMIZERS):
            return reason
        try:
            stages_of(run.network)
        except UnsupportedNetworkError as reason:
            return str(reason)
        if run.spec.rows > MAX_ROWS or min(run.spec.batch_size, run.spec.rows) > MAX_BATCH:
            return f"it takes at most {MAX_ROWS} rows and batches of {MAX_BATCH}"
        return ""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> GraphSession:
        from onelaunch.engines.graph.session import GraphSession
        from onelaunch.engines.graph.streamed import StreamedSession

        return (GraphSession if run.x.device == run.device else StreamedSession)(run, state)


ENGINE = GraphEngine()
