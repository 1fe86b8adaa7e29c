"""The CPU engine against other ways to train a small network on a CPU: time per step, data in memory, the same batches.

The peers are eager PyTorch, compiled PyTorch, a JAX scan over a whole epoch (one call, no Python between steps; the strongest
of them) and scikit-learn's MLPClassifier. Each call of a contender is one epoch over ROWS rows.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.peers_torch import loop, reference_losses, worst_relative
from onelaunch.bench.step_peers import SCAN, made_when_called, scan
from onelaunch.bench.workload import Workload
from onelaunch.engines.contract import Run, Segment
from onelaunch.engines.cpu.session import CpuSession
from onelaunch.train.loop import StopSwitch
from onelaunch.train.progress import Progress

CPU = torch.device("cpu")
ROWS, CHECKED_STEPS = 8192, 50
ENDLESS = 2**20  # epochs: more than any benchmark runs


def _ours(run: Run) -> Work:
    """An endless run, one epoch per call."""
    segments: Iterator[Segment] = CpuSession(run, {}).segments(0, StopSwitch(Progress()))
    return functools.partial(next, segments)


def _scikit_learn_epoch(run: Run, workload: Workload) -> Work:
    from sklearn.neural_network import MLPClassifier

    x, y = run.x.numpy(), run.y.numpy()
    model = MLPClassifier(
        workload.widths[1:-1], solver=run.spec.optimizer, alpha=0.0, batch_size=run.spec.batch_size,
        learning_rate_init=run.spec.lr, momentum=0.0,
    )  # fmt: skip
    return lambda: model.partial_fit(x, y, classes=range(workload.widths[-1]))


def _check(workload: Workload) -> None:
    """The first losses against a plain float64 loop over the same rows."""
    run = workload.run(CPU, rows=ROWS, steps=CHECKED_STEPS)
    expected = reference_losses(run, CHECKED_STEPS)
    session = CpuSession(run, {})
    got = torch.cat([segment.losses for segment in session.segments(0, StopSwitch(Progress()))])
    session.close()
    gap = worst_relative(got.tolist(), expected)
    assert gap <= 1e-5, f"losses differ from float64 by {gap:.2g} relative at a step"


def _trial(workload: Workload) -> Trial:
    torch.manual_seed(0)
    torch.compiler.reset()  # otherwise the networks of earlier cases count towards the limit of recompilations
    run = workload.run(CPU, rows=ROWS, epochs=ENDLESS)
    steps = run.spec.steps_per_epoch
    peers: dict[str, Work] = {
        "torch eager": functools.partial(loop(run), steps),
        "torch.compile": functools.partial(loop(run, "default"), steps),
        SCAN: functools.partial(made_when_called(lambda: scan(run, steps, unroll=1)), steps),
    }
    if workload.kind == "mlp":
        peers["scikit-learn"] = _scikit_learn_epoch(run, workload)
    return Trial(_ours(run), lambda: _check(workload), peers, units=steps, floor_flops=ROWS * workload.flops_per_row)


def _register(workload: Workload) -> None:
    network, batch, optimizer = workload.network, workload.batch, workload.optimizer
    kind = "" if workload.kind == "mlp" else f"{workload.kind}/"
    about = f"{network}{' with ' * bool(kind)}{kind[:-1]}, batch {batch}, {optimizer}, fp32: an epoch of {ROWS} rows"
    case(f"cpu/{kind}{network}/{batch}/{optimizer}", "cpu", about)(lambda: _trial(workload))


for _workload in (
    Workload((64, 32, 10), 32),
    Workload((784, 128, 128, 128, 10), 32),
    Workload((784, 784, 784, 784, 10), 64),
    Workload((784, 512, 512, 10), 128),
    Workload((784, 128, 128, 128, 10), 32, "adam"),
    *(
        Workload(widths, 128, kind=kind)
        for kind in ("layer_norm", "residual")
        for widths in ((30, 64, 64, 2), (784, 512, 512, 10))
    ),
):
    _register(_workload)


def _start_trial(warm: bool) -> Trial:
    torch.manual_seed(0)
    run = Workload((784, 128, 128, 128, 10), 32).run(CPU, rows=ROWS, epochs=1)
    keep = tempfile.TemporaryDirectory(prefix="onelaunch-bench-")

    def start() -> None:
        if warm:
            CpuSession(run, {}, cache_folder=Path(keep.name)).close()
            return
        with tempfile.TemporaryDirectory(prefix="onelaunch-bench-") as fresh:
            CpuSession(run, {}, cache_folder=Path(fresh)).close()

    def check() -> None:
        start()
        assert not warm or any(Path(keep.name).iterdir()), f"no code was kept in {keep.name}"

    return Trial(ours=start, check=check)


@case("cpu/start/new", "cpu", "784-128-128-128-10: code generated for a network not seen before", unit="start")
def start_new() -> Trial:
    return _start_trial(warm=False)


@case("cpu/start/cached", "cpu", "784-128-128-128-10: code of an earlier run loaded from disk", unit="start")
def start_cached() -> Trial:
    return _start_trial(warm=True)
