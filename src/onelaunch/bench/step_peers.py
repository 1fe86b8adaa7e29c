"""The peers without Python between two steps: a whole step as a CUDA graph, and a JAX scan over many steps.

`timed` makes a peer of a case out of one of them; `step_peers` makes contenders of `compare --sizes`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from onelaunch.bench.case import Work
from onelaunch.bench.contenders import Contender, Trained
from onelaunch.bench.peers_jax import MATMUL, jax_scan, jax_unavailable_reason
from onelaunch.bench.peers_torch import Captured, Steps, row_order, seconds_of
from onelaunch.device import cuda_unavailable_reason
from onelaunch.engines.contract import Run
from onelaunch.integers import ceil_div

GRAPH, COMPILED_GRAPH, SCAN, UNROLLED = "CUDA graph", "CUDA graph, compiled", "JAX scan", "JAX scan, unroll 10"
SCANNED_STEPS = 1000  # per call of `compare --sizes`: enough to make the launch negligible
PLAIN = (nn.Sequential, nn.Flatten, nn.Linear, nn.ReLU)


def scan(run: Run, steps: int, unroll: int = 10) -> Steps:
    work = jax_scan(run, row_order(run, steps), unroll)
    return lambda count: work()


def made_when_called(make: Callable[[], Steps]) -> Steps:
    """A peer that its first call, the warm-up, makes: compiling takes long, and one that cannot be made is only absent."""
    made = functools.cache(make)
    return lambda count: made()(count)


def timed(make: Callable[[], Steps], steps: int, units: int) -> Work:
    """A self-timed peer: each call takes `steps` steps, which are `units` units."""
    return seconds_of(made_when_called(make), steps, units)


@dataclass
class StepPeer:
    """A contender that is only timed: whole calls of `call` steps, together at least as many as the run asks for."""

    name: str
    make: Callable[[], Steps]
    call: int = 1

    def __post_init__(self) -> None:
        self._made = functools.cache(self.make)

    def train(self, run: Run) -> Trained:
        steps, calls = self._made(), ceil_div(run.spec.total_steps, self.call)
        _wait(run.device)
        begin = time.perf_counter()
        for _ in range(calls):
            steps(self.call)
        _wait(run.device)
        return Trained(run.model, epochs=[(calls * self.call, time.perf_counter() - begin)])


def step_peers(run: Run) -> tuple[list[Contender], dict[str, str]]:
    """The peers that can take the steps of `run` on this machine, and the reason of each that cannot. They do not validate."""
    run = replace(run, validation=None)
    different = _unsupported_reason(run)
    no_graph = different or cuda_unavailable_reason(run.device)
    no_scan = different or jax_unavailable_reason(run.device)
    peers: list[Contender] = []
    if not no_graph:
        peers.append(StepPeer(GRAPH, lambda: Captured(run)))
    if not no_scan:
        peers.append(StepPeer(UNROLLED, lambda: scan(run, SCANNED_STEPS), SCANNED_STEPS))
    return peers, {name: reason for name, reason in ((GRAPH, no_graph), (UNROLLED, no_scan)) if reason}


def _unsupported_reason(run: Run) -> str:
    """What these peers, written for the benchmarks, would do differently in `run`; empty if nothing."""
    spec = run.spec
    if other := [module for module in run.model.modules() if not isinstance(module, PLAIN)]:
        return f"takes Linear and ReLU only, not {type(other[0]).__name__}"
    supported = {
        "optimizer": spec.optimizer in ("sgd", "adam"), "schedule": spec.schedule == "constant",
        "momentum": not spec.momentum, "weight_decay": not spec.weight_decay, "label_smoothing": not spec.label_smoothing,
        "loss": spec.loss in ("cross_entropy", "mse"), "precision": spec.precision in MATMUL,
    }  # fmt: skip
    return next((f"does not take {name}={getattr(spec, name)!r}" for name, taken in supported.items() if not taken), "")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
