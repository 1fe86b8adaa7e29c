"""The run's position and row order on the device; tests/engines/graph/test_parity.py has the rest of run_state.py."""

from __future__ import annotations

import pytest
import torch

import onelaunch as ol
from tests.engines.graph.harness import DEVICE


@pytest.mark.parametrize("rows", [1, 2, 37, 1025])
def test_the_row_order_is_that_of_every_engine(rows):
    from onelaunch.engines.graph.kernels.run_state import fill_row_order

    order = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
    fill_row_order(order, torch.zeros(8, dtype=torch.int64, device=DEVICE), 2**63 + 5, 3)
    assert torch.equal(order.cpu().long(), ol.permutation(rows, 2**63 + 5, 3).cpu())


def test_advance_moves_both_steps_and_no_count():
    from onelaunch.engines.graph.kernels.run_state import advance

    control = torch.tensor([3, 70, 11, 0], device=DEVICE)
    advance(control, 8)
    assert control.tolist() == [11, 78, 11, 0]
