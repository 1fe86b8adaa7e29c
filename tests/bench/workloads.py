"""Small workloads with every option that the peers support."""

from __future__ import annotations

import torch

from onelaunch.bench.workload import Workload

CPU = torch.device("cpu")
WORKLOADS = [
    Workload((12, 16, 16, 5), 8),
    Workload((12, 16, 5), 8, "adam"),
    Workload((12, 16, 3), 8, loss="mse", bias=False),
    Workload((12, 16, 16, 5), 8, kind="layer_norm"),
    Workload((12, 16, 16, 5), 8, kind="residual"),
    Workload((12, 16, 5), 8, precision="bf16"),
    Workload((12, 16, 5), 8, uint8_rows=True),
]
