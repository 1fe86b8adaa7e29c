"""Allocators for a training step's buffers: one plan, PyTorch's pool, the driver's stream-ordered pool, and cudaMalloc and
cudaFree for every buffer of every step, which the other three avoid.

All of them run the same kernels in the same order, launched one by one, so that only the allocator differs. A second case
replays the step as a graph, which calls no allocator. The notes give calls to the allocator and the peak of bytes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.measure import cuda_device
from onelaunch.engines.contract import Run
from onelaunch.train.inputs import make_run

WIDTHS, BATCH, ROWS, STEPS = (784, 1024, 1024, 1024, 10), 256, 8192, 32
ALLOCATORS = {"caching": "PyTorch's pool", "stream": "cudaMallocAsync", "malloc": "cudaMalloc each time"}


def _run() -> Run:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, device="cuda"), nn.GELU()]
    x, y = torch.rand(ROWS, WIDTHS[0], device="cuda"), torch.randint(WIDTHS[-1], (ROWS,), device="cuda")
    options = {"epochs": 2**20, "batch_size": BATCH, "optimizer": "adam", "precision": "bf16", "engine": "graph"}
    return make_run(nn.Sequential(*layers[:-1]), x, y, None, options)


def _steps(memory: str, capture: bool, notes: dict[str, str]) -> Work:
    from onelaunch.engines.graph.session import GraphSession

    session = GraphSession(_run(), {}, capture=capture, memory=memory, tma=False)
    session.train_steps(STEPS)  # kernels compiled, graphs captured, pools filled
    torch.cuda.synchronize()
    before = session.buffers.calls
    session.train_steps(STEPS)
    calls = (session.buffers.calls - before) / STEPS
    name = ALLOCATORS.get(memory, "planned")
    notes[name] = f"{calls:g} calls to the allocator per step, {session.buffers.peak_bytes / 2**20:.1f} MiB at the peak"

    def work() -> None:
        session.train_steps(STEPS)
        if not capture:  # timed by the host's clock, because the launches take the time
            torch.cuda.synchronize()

    return work


def _check(capture: bool) -> None:
    """All allocators lead to the same weights, to the bit."""
    from onelaunch.engines.graph.session import GraphSession

    expected: torch.Tensor | None = None
    for memory in ("plan", *ALLOCATORS) if not capture else ("plan", "caching", "stream"):
        run = _run()
        session = GraphSession(run, {}, capture=capture, memory=memory, tma=False)
        session.train_steps(STEPS)
        session.close()
        got = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
        assert torch.isfinite(got).all(), f"weights of memory={memory!r} are not finite"
        assert expected is None or torch.equal(got, expected), f"memory={memory!r} gives different weights than 'plan'"
        expected = got


def _trial(capture: bool) -> Trial:
    cuda_device()
    notes: dict[str, str] = {}
    others = {memory: name for memory, name in ALLOCATORS.items() if memory != "malloc" or not capture}
    peers = {name: _steps(memory, capture, notes) for memory, name in others.items()}
    ours = _steps("plan", capture, notes)
    return Trial(ours, lambda: _check(capture), peers, units=STEPS, cuda=capture, notes=notes)


_NETWORK = f"{'-'.join(map(str, WIDTHS))}, batch {BATCH}, Adam, bf16"


@case("memory/launched", "memory", f"{_NETWORK}: a step's kernels launched one by one, buffers allocated and freed")
def launched() -> Trial:
    return _trial(capture=False)


@case("memory/captured", "memory", f"{_NETWORK}: the same step replayed as a graph")
def captured() -> Trial:
    return _trial(capture=True)
