"""An unknown optimizer is refused; tests/engines/graph/test_parity.py compares every update with the eager engine's."""

from __future__ import annotations

import pytest
import torch

from tests.engines.graph.harness import DEVICE


def test_an_unknown_name_runs_no_other_arithmetic():
    from onelaunch.engines.graph.kernels.run_arguments import Clock, Weights
    from onelaunch.engines.graph.kernels.split_k_update import split_k_update

    weight = torch.ones(8, device=DEVICE)
    weights = Weights(weight, None, torch.zeros_like(weight), torch.zeros_like(weight))
    clock = Clock(torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.ones(2, 8, device=DEVICE), 0)
    with pytest.raises(Exception, match=r"(?i)assert"):
        split_k_update(torch.ones(1, 8, device=DEVICE), None, weights, clock, optimizer="adagrad")
    assert torch.equal(weight, torch.ones_like(weight))
