"""How long the device takes for calls that are worth choosing between: as CUDA graphs, so that launch cost does not mislead."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from onelaunch.capture import capturing

TIMED_SECONDS = 2e-3  # of GPU time for each sample
SAMPLES = 11


def graph_times(runs: Mapping[str, Callable[[int], object]]) -> dict[str, float]:
    """Least GPU seconds of one call of each, infinite for one that finds no room. A run gets the number of the call.

    They are taken in turns: a chip that warms up slows all of them alike, and one at the limit of its power now this one, now
    that.
    """
    from triton.runtime.errors import OutOfResources, PTXASError

    no_room = (OutOfResources, PTXASError, torch.OutOfMemoryError)  # of shared memory for its tile, say
    graphs, cannot = {}, {}
    for name, run in runs.items():
        try:
            graphs[name] = _captured(run)
        except no_room as error:
            error.__traceback__ = None  # Triton keeps the error, and this would keep the call's tensors
            cannot[name] = float("inf")
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(SAMPLES):
        for name, (graph, repeats) in graphs.items():
            samples[name].append(_replay_seconds(graph) / repeats)
    return cannot | {name: min(taken) for name, taken in samples.items()}


def _captured(run: Callable[[int], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of some calls, long enough to be timed, and their number."""
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
        repeats = max(2, min(200, int(TIMED_SECONDS / max(1e-6, _replay_seconds(graph)))))


def _replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3
