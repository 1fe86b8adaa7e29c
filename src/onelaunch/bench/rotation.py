"""Calls of an op over rotating inputs, so that no input is still in the L2 cache from its last use.

Nearly everything is timed as a CUDA graph of several calls, so that times hold no launch cost. The peers gain by that too:
outside a graph they pay for each of their launches. Inside a graph our dropout draws its key with a kernel of its own, 2 µs on
an H200, which an eager call does not need.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, partial

import torch

from onelaunch.bench.case import Trial, Work
from onelaunch.capture.graph import capturing
from onelaunch.integers import clamp, round_up

Step = Callable[[int], object]  # does the work on input set i
ROTATED_BYTES = 256 * 2**20  # of all input sets together: several times any L2
MIN_CALLS = 24  # per sample


def input_sets(bytes_per_set: int) -> int:
    """How many input sets to rotate over."""
    return clamp(3, ROTATED_BYTES // max(1, bytes_per_set) + 1, 64)


def calls_for(sets: int) -> int:
    """Calls per graph: whole rounds over the input sets, and enough of them to make the cost of a replay negligible."""
    return round_up(MIN_CALLS, sets)


def graphed(step: Step, sets: int) -> Work:
    """A CUDA graph of several calls over the input sets in turn."""
    gc.collect()  # a live autograd graph on another stream would end the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for call in range(calls_for(sets)):
            step(call % sets)
    return graph.replay


def streamed(step: Step, sets: int) -> Work:
    """The same calls launched one by one, for work that takes the device longer than the host."""

    def work() -> None:
        for call in range(calls_for(sets)):
            step(call % sets)

    return work


def _graphed_when_called(step: Step, sets: int) -> Work:
    """A graph that is captured at its first call, so that only a peer that cannot be captured fails."""
    graph = cache(lambda: graphed(step, sets))
    return lambda: graph()()


def trial(
    steps: dict[str, Step],
    sets: int,
    check: Work,
    in_graph: bool = True,
    *,
    moved: float = 0,
    flops: float = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Trial:
    """A trial of these steps, of which the first is ours. `moved` bytes and `flops` of `dtype` are the least that one call
    needs."""
    works: dict[str, Work] = {
        name: _graphed_when_called(step, sets) if in_graph else streamed(step, sets) for name, step in steps.items()
    }
    ours, *peers = works
    memory = {name: partial(step, 0) for name, step in steps.items()}
    others = {peer: works[peer] for peer in peers}
    calls = calls_for(sets)
    return Trial(
        works[ours], check, others, units=calls, cuda=True, memory=memory, floor_bytes=calls * moved or None,
        floor_flops=calls * flops or None, floor_dtype="fp32" if dtype == torch.float32 else "bf16",
    )  # fmt: skip


def training_step(function: Callable[..., torch.Tensor], inputs: list[list[torch.Tensor]], dy: torch.Tensor) -> Step:
    """Forward, and backward to every input, with the upstream gradient `dy`."""

    def step(index: int) -> object:
        return torch.autograd.grad(function(*inputs[index]), inputs[index], dy)

    return step


def forward_step(function: Callable[..., torch.Tensor], inputs: list[list[torch.Tensor]]) -> Step:
    return lambda index: function(*inputs[index])
