"""When the graph engine is available."""

from __future__ import annotations

import torch

from onelaunch.device import cuda_unavailable_reason
from onelaunch.engines.graph import ENGINE


def test_needs_a_cuda_device():
    reason = ENGINE.unavailable_reason(torch.device("cpu"))
    assert reason == cuda_unavailable_reason(torch.device("cpu")) != ""
    assert "GPU" in reason if torch.cuda.is_available() else reason == "this machine has no CUDA device"
