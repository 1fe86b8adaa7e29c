"""Nothing is read before it is written, and nothing outside the arena or the data is touched."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu.arena import Arena
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import host
from onelaunch.engines.cpu.session import settings_for
from tests.engines.cpu.runs import assert_same_bits, data, make, train_natively

PAGE = mmap.PAGESIZE


def networks() -> dict[str, tuple[nn.Sequential, dict[str, Any]]]:
    torch.manual_seed(0)
    return {
        "everything": (
            nn.Sequential(
                nn.Dropout(0.1), nn.BatchNorm1d(21), nn.Linear(21, 70), nn.Tanh(), nn.BatchNorm1d(70), nn.GELU(),
                nn.Dropout(0.3), nn.Linear(70, 33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 5),
            ),
            {"optimizer": "adam", "batch_size": 24},
        ),
        "plain": (nn.Sequential(nn.Linear(21, 50), nn.ReLU(), nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 5)), {}),
        "many outputs": (nn.Sequential(nn.Linear(21, 3), nn.Sigmoid(), nn.Linear(3, 70)), {"momentum": 0.9}),
        "mse": (nn.Sequential(nn.Linear(21, 1, bias=False), nn.SiLU(), nn.Linear(1, 19)), {"loss": "mse"}),
    }  # fmt: skip


def run_of(name: str) -> Run:
    model, options = networks()[name]
    loss = options.get("loss", "cross_entropy")
    outputs = [layer for layer in model if isinstance(layer, nn.Linear)][-1].out_features
    x, y = data(loss, 61, 21, outputs)
    return make(model, x, y, (x[:30], y[:30]), epochs=3, **{"batch_size": 16, **options})


def plan_for(run: Run, shares: int) -> Plan:
    return Plan(settings_for(run, shares), host())


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", networks())
def test_a_poisoned_arena_changes_nothing(name: str, shares: int, place: Path) -> None:
    """All bytes 0xFF: every float in it is NaN. The gaps between buffers must still hold it after the run."""
    run = run_of(name)
    plan = plan_for(run, shares)
    size = Arena.size_for(plan, run.spec.rows)
    raw = np.full(size + 64, 0xFF, np.uint8)
    memory = raw[-raw.ctypes.data % 64 :][:size]
    poisoned = train_natively(run, place, shares=shares, memory=memory)
    assert_same_bits(poisoned, train_natively(run, place, shares=shares))
    assert poisoned.losses.isfinite().all()
    used = np.zeros(size, bool)
    for buffer in plan.buffers.values():
        used[buffer.offset : buffer.offset + buffer.size] = True
    used[plan.size :] = True
    assert (memory[~used] == 0xFF).all()


class Guarded:
    """Memory between two pages that fault when touched; the bytes end right before the second."""

    def __init__(self, size: int) -> None:
        inner = -(-size // PAGE) * PAGE
        self.mapping = mmap.mmap(-1, inner + 2 * PAGE)
        self.whole = np.frombuffer(self.mapping, np.uint8)
        base = self.whole.ctypes.data
        protect = ctypes.CDLL(None).mprotect
        for page in (base, base + PAGE + inner):
            assert protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
        self.at_end = self.whole[PAGE + inner - size : PAGE + inner]


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("bytes_in", [False, True])
@pytest.mark.parametrize("name", networks())
def test_guard_pages(name: str, bytes_in: bool, shares: int, place: Path) -> None:
    """Arena, x, y and validation data each end right before a page that must not be touched (a fault ends the test run)."""
    run = run_of(name)
    x = (run.x * 40 + 100).clamp(0, 255).to(torch.uint8) if bytes_in else run.x
    assert run.validation is not None
    tensors = [x, run.y, x[:30].clone(), run.validation[1]]
    guarded = []
    for tensor in tensors:
        guard = Guarded(tensor.numel() * tensor.element_size())
        guard.at_end[:] = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
        guarded.append(torch.from_numpy(guard.at_end.view(tensor.numpy().dtype)).view(tensor.shape))
    fenced = Run(run.spec, run.model, run.network, "", guarded[0], guarded[1], (guarded[2], guarded[3]), run.outputs)
    memory = Guarded(Arena.size_for(plan_for(fenced, shares), run.spec.rows))
    assert train_natively(fenced, place, shares=shares, memory=memory.at_end).losses.isfinite().all()
