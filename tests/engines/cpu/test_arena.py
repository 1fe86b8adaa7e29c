"""Nothing is read before it is written, and nothing outside the arena and the data is touched."""

from __future__ import annotations

import ctypes
import dataclasses
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
from onelaunch.integers import round_up
from tests.engines.cpu.runs import assert_same_bits, data, make, train_natively
from tests.pairwise import cases

PAGE = mmap.PAGESIZE
NETWORKS: dict[str, tuple[tuple[nn.Module, ...], dict[str, Any]]] = {
    "everything": (
        (
            nn.Dropout(0.1), nn.BatchNorm1d(21), nn.Linear(21, 70), nn.Tanh(), nn.BatchNorm1d(70), nn.GELU(),
            nn.Dropout(0.3), nn.Linear(70, 33), nn.ReLU(), nn.Dropout(0.2), nn.Linear(33, 5),
        ),
        {"optimizer": "adam", "batch_size": 24},
    ),
    "plain": ((nn.Linear(21, 50), nn.ReLU(), nn.Linear(50, 40), nn.ReLU(), nn.Linear(40, 5)), {}),
    "many outputs": ((nn.Linear(21, 3), nn.Sigmoid(), nn.Linear(3, 70)), {"momentum": 0.9}),
    "tiles": (
        (nn.Linear(21, 80), nn.ReLU(), nn.Linear(80, 70), nn.GELU(), nn.Linear(70, 64), nn.ReLU(), nn.Linear(64, 5)),
        {"precision": "bf16", "optimizer": "adam", "batch_size": 17},
    ),
    "rows": (
        (
            nn.Dropout(0.1), nn.Linear(21, 50), nn.LayerNorm(50), nn.GELU(), nn.Dropout(0.3), nn.Linear(50, 33), nn.ReLU(),
            nn.Linear(33, 20), nn.Tanh(), nn.Linear(20, 5),
        ),
        {"optimizer": "adam", "batch_size": 73, "rows": 161},
    ),
    "rows, plain": (
        (nn.Linear(21, 33, bias=False), nn.ReLU(), nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, 40)),
        {"batch_size": 97, "rows": 161},
    ),
    "mse": ((nn.Linear(21, 1, bias=False), nn.SiLU(), nn.Linear(1, 19)), {"loss": "mse"}),
}  # fmt: skip


def run_of(name: str, uint8_rows: bool) -> Run:
    torch.manual_seed(0)
    layers, options = NETWORKS[name]
    options = dict(options)
    rows = options.pop("rows", 61)
    outputs = [layer for layer in layers if isinstance(layer, nn.Linear)][-1].out_features
    x, y = data(options.get("loss", "cross_entropy"), rows, 21, outputs)
    if uint8_rows:
        x = (x * 40 + 100).clamp(0, 255).to(torch.uint8)
    return make(nn.Sequential(*layers), x, y, (x[:30], y[:30]), epochs=3, **{"batch_size": 16, **options})


def guarded_bytes(size: int) -> np.ndarray[Any, Any]:
    """`size` bytes right before a page that must not be touched, and after another one."""
    inner = round_up(size, PAGE)
    whole = np.frombuffer(mmap.mmap(-1, inner + 2 * PAGE), np.uint8)
    protect = ctypes.CDLL(None).mprotect
    for page in (whole.ctypes.data, whole.ctypes.data + PAGE + inner):
        assert protect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    return whole[PAGE + inner - size : PAGE + inner]


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    memory = guarded_bytes(tensor.numel() * tensor.element_size())
    memory[:] = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
    return torch.from_numpy(memory.view(tensor.numpy().dtype)).view(tensor.shape)


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize(
    ("name", "uint8_rows", "partitions"), [*cases(tuple(NETWORKS), (False, True), (1, 2)), ("rows, plain", False, 3)]
)
def test_poisoned_memory_between_guard_pages(name: str, uint8_rows: bool, partitions: int, cache_folder: Path) -> None:
    """Arena, x, y and validation data each end right before a page that must not be touched (a fault ends the test run).

    All bytes of the arena are 0xFF at first, so that every float in it is NaN: the run must have the bits of one on fresh
    memory, and the gaps between buffers must still be 0xFF at the end.
    """
    if name == "tiles" and host().lanes != 16:
        pytest.skip("tiles need AVX-512 beside them")
    run = run_of(name, uint8_rows)
    assert run.validation is not None
    x, y = run.validation
    fenced = dataclasses.replace(run, x=guarded(run.x), y=guarded(run.y), validation=(guarded(x), guarded(y)))
    target = dataclasses.replace(host(), tiles="emulated" if host().lanes == 16 else "")
    plan = Plan(settings_for(fenced, partitions), target)
    assert plan.by_rows == (partitions > 1 and name.startswith("rows"))
    memory = guarded_bytes(Arena.size_for(plan, run.spec.rows))
    memory[:] = 0xFF
    poisoned = train_natively(fenced, cache_folder, partitions=partitions, memory=memory, target=target)
    assert_same_bits(poisoned, train_natively(run, cache_folder, partitions=partitions, target=target))
    assert poisoned.losses.isfinite().all()
    used = np.zeros(len(memory), bool)
    for buffer in plan.buffers.values():
        used[buffer.offset : buffer.offset + buffer.size] = True
    used[plan.size :] = True
    assert (memory[~used] == 0xFF).all()
