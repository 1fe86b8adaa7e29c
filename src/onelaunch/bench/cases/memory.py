"""Where a training step's buffers come from: planned once, PyTorch's pool, the driver's stream-ordered pool, or a cudaMalloc
and cudaFree for every buffer of every step, which is what the other three avoid.

The same kernels run in the same order on all of them, launched one by one, so that the allocator is all that differs; and once
more captured as a graph, where nobody is asked any more. The notes give calls to the allocator and the bytes at the peak.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from onelaunch.bench.case import Trial, Work, case
from onelaunch.engines.contract import Run
from onelaunch.errors import UnsupportedError
from onelaunch.train.inputs import make_run

WIDTHS, BATCH, ROWS, STEPS = (784, 1024, 1024, 1024, 10), 256, 8192, 32
WAYS = {"caching": "PyTorch's pool", "stream": "cudaMallocAsync", "malloc": "cudaMalloc each time"}


def _run(precision: str = "bf16") -> Run:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, device="cuda"), nn.GELU()]
    x, y = torch.rand(ROWS, WIDTHS[0], device="cuda"), torch.randint(WIDTHS[-1], (ROWS,), device="cuda")
    options = {"epochs": 2**20, "batch_size": BATCH, "optimizer": "adam", "precision": precision, "engine": "graph"}
    return make_run(nn.Sequential(*layers[:-1]), x, y, None, options)


def _steps(memory: str, capture: bool, notes: dict[str, str]) -> Work:
    from onelaunch.engines.graph.session import GraphSession

    session = GraphSession(_run(), {}, capture=capture, memory=memory, tma=False)
    session.train_steps(STEPS)  # kernels compiled, graphs captured, pools filled
    torch.cuda.synchronize()
    before = session.buffers.calls
    session.train_steps(STEPS)
    calls = (session.buffers.calls - before) / STEPS
    name = WAYS.get(memory, "planned")
    notes[name] = f"{calls:g} calls to the allocator a step, {session.buffers.peak_bytes / 2**20:.1f} MiB at the peak"

    def work() -> None:
        session.train_steps(STEPS)
        if not capture:  # timed by the host's clock: its launches are what takes the time
            torch.cuda.synchronize()

    return work


def _check(capture: bool) -> None:
    """The same weights to the bit after some steps, wherever the memory came from."""
    from onelaunch.engines.graph.session import GraphSession

    expected: torch.Tensor | None = None
    for memory in ("plan", *WAYS) if not capture else ("plan", "caching", "stream"):
        run = _run()
        session = GraphSession(run, {}, capture=capture, memory=memory, tma=False)
        session.train_steps(STEPS)
        session.close()
        got = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
        assert torch.isfinite(got).all(), f"weights of memory={memory!r} are not finite"
        assert expected is None or torch.equal(got, expected), f"memory={memory!r} gives other weights than 'plan'"
        expected = got


def _trial(capture: bool) -> Trial:
    if not torch.cuda.is_available():
        raise UnsupportedError("this machine has no CUDA device")
    notes: dict[str, str] = {}
    ways = {memory: name for memory, name in WAYS.items() if memory != "malloc" or not capture}
    return Trial(
        ours=_steps("plan", capture, notes),
        check=lambda: _check(capture),
        peers={name: _steps(memory, capture, notes) for memory, name in ways.items()},
        units=STEPS,
        cuda=capture,
        notes=notes,
    )


_NETWORK = f"{'-'.join(map(str, WIDTHS))}, batch {BATCH}, Adam, bf16"


@case("memory/launched", "memory", f"{_NETWORK}: a step's kernels launched one by one, buffers taken and given back")
def launched() -> Trial:
    return _trial(capture=False)


@case("memory/captured", "memory", f"{_NETWORK}: the same step replayed as a graph")
def captured() -> Trial:
    return _trial(capture=True)
