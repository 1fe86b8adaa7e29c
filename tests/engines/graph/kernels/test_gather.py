"""Rows gathered by a few programs are those of `index_select`: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from onelaunch.engines.graph.kernels.gather import PROGRAMS, gather_rows
from tests.engines.graph.harness import DEVICE


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (65, 7), (PROGRAMS * 64 + 3, 20), (5, 1030), (2, 3000)])
@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.float32), (torch.uint8, torch.uint8), (torch.float32, torch.float16)],
)
def test_every_row_arrives_once_and_nothing_else_is_written(rows, width, source, target):
    values = (torch.randn(rows + 9, width) * 50 + 100).clamp(0, 255).to(source).to(DEVICE)
    order = torch.randperm(rows + 9)[:rows].to(DEVICE, torch.int32)
    memory = torch.full((rows + 2, width), 7, dtype=target, device=DEVICE)
    gather_rows(values, order, memory[1:-1])
    assert torch.equal(memory[1:-1], values[order.long()].to(target))
    assert bool((memory[[0, -1]] == 7).all())
