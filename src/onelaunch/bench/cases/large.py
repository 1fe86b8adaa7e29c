"""Networks and batches too large for the resident engine, on the graph engine: `onelaunch bench train --large`.

All contenders keep the data on the GPU, gather each batch there, and compute in bf16 with fp32 master weights. None runs Python
between two steps: the peers are a whole step as a CUDA graph (as written, and compiled first) and a JAX scan over many steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import pairwise

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.cases.train import check_losses, train
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.peers_torch import Captured
from onelaunch.bench.step_peers import COMPILED_GRAPH, GRAPH, UNROLLED, scan, timed
from onelaunch.bench.workload import Workload
from onelaunch.engines.contract import Run

SAMPLES = 5
BYTES_PER_WEIGHT = 10  # forward reads the high 16 bits (2); backward reads and writes the whole fp32 weight (8)


@dataclass(frozen=True)
class Large:
    workload: Workload
    rows: int
    steps: int  # per call of ours
    peer_steps: int
    thorough: bool = False  # also time a compiled step, which takes long to make

    def floor_bytes(self) -> float:
        """The bytes that a step must move: weights and input. They bound a small batch; a large one is bound by arithmetic."""
        weights = sum(inputs * outputs for inputs, outputs in pairwise(self.workload.widths))
        return BYTES_PER_WEIGHT * weights + 2 * self.workload.batch * self.workload.widths[0]


def _peers(run: Run, steps: int, *, thorough: bool) -> tuple[dict[str, Work], dict[str, str]]:
    peers = {GRAPH: timed(lambda: Captured(run), steps, steps), UNROLLED: timed(lambda: scan(run, steps), steps, steps)}
    absent = {}
    if thorough:
        peers[COMPILED_GRAPH] = timed(lambda: Captured(run, "default"), steps, steps)
    else:
        absent[COMPILED_GRAPH] = "left out: long to make; timed at 784-1024-1024-1024-10 of batch 4096"
    return peers, absent


def _trial(large: Large) -> Trial:
    workload = large.workload
    fresh = functools.partial(workload.run, cuda_device(), rows=large.rows, engine="graph", steps=large.steps)
    run = fresh()
    peers, absent = _peers(run, large.peer_steps, thorough=large.thorough)
    if workload.loss == "mse":
        absent["tiny-cuda-nn"] = (
            "not installed; 134.6 µs per step in fp16 with its run-time compiler, measured separately"
        )
    return Trial(
        ours=lambda: train(run)[2] / large.steps, check=lambda: check_losses(fresh()), peers=peers, absent=absent,
        floor_bytes=large.floor_bytes(), floor_flops=workload.batch * workload.flops_per_row, floor_dtype="bf16", cuda=True,
        self_timed=True, repeats=SAMPLES,
    )  # fmt: skip


def _register(large: Large) -> None:
    workload = large.workload
    name = f"train/large/{workload.network}/{workload.batch}"
    about = f"{workload.network}, batch {workload.batch}, sgd, bf16, {workload.loss}: one step of a long run"
    case(name, "train", about)(lambda: _trial(large))


def _mlp(hidden: int, batch: int) -> Workload:
    return Workload((784, hidden, hidden, hidden, 10), batch, precision="bf16")


_register(Large(_mlp(2048, 32), 61_440, 7680, 1000))
_register(Large(_mlp(1024, 4096), 65_536, 1600, 400, thorough=True))
_register(Large(Workload((64, 64, 64, 16), 262_144, precision="bf16", loss="mse", bias=False), 8 * 262_144, 3200, 400))
_register(Large(_mlp(8192, 32), 61_440, 960, 200))
