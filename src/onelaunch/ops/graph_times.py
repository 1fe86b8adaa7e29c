"""GPU times of alternative calls, measured as CUDA graphs so that launch cost does not mislead."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onelaunch.capture.graph import capturing
from onelaunch.integers import clamp

TIMED_SECONDS = 2e-3  # GPU time per sample
SAMPLES = 11


def graph_times(runs: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """The smallest measured GPU time of one call of each run, in seconds; infinite if it does not fit into memory.

    A run is called with the number of the call. Samples are taken in turns, so that a chip that warms up or reaches its power
    limit slows all runs alike.
    """
    from triton.runtime.errors import OutOfResources, PTXASError

    does_not_fit = (OutOfResources, PTXASError, torch.OutOfMemoryError)  # a tile in shared memory, for example
    graphs, infinite = {}, {}
    for name, run in runs.items():
        try:
            graphs[name] = _captured(run)
        except does_not_fit as error:
            error.__traceback__ = None  # Triton keeps the error, and its traceback would keep the tensors
            infinite[name] = float("inf")
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(SAMPLES):
        for name, (graph, repeats) in graphs.items():
            samples[name].append(_replay_seconds(graph) / repeats)
    return infinite | {name: min(taken) for name, taken in samples.items()}


def _captured(run: Callable[[int], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a graph of several calls, long enough to be timed; the number of calls)."""
    run(0)  # compiles, loads, creates handles
    repeats = 1
    while True:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            for number in range(repeats):
                run(number)
        graph.replay()
        if repeats > 1:
            return graph, repeats
        repeats = clamp(2, int(TIMED_SECONDS / max(1e-6, _replay_seconds(graph))), 200)


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3
