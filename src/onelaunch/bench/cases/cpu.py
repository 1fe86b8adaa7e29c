"""The CPU engine against other ways to train a small network on a CPU: time per step, data in memory, the same batches.

The peers are eager PyTorch, compiled PyTorch, a JAX scan over a whole epoch (one call, no Python between steps; the strongest
of them) and scikit-learn's MLPClassifier. Each call of a contender is one epoch over ROWS rows. Cases in tf32 (two bf16 planes)
and bf16 need a CPU with AMX; their peers compute in fp32 and bf16.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.peers_torch import loop, reference_losses, worst_relative
from onelaunch.bench.step_peers import SCAN, made_when_called, scan
from onelaunch.bench.workload import Workload
from onelaunch.engines.contract import Run, Segment
from onelaunch.engines.cpu import ENGINE
from onelaunch.engines.cpu.native import library
from onelaunch.engines.cpu.session import CpuSession
from onelaunch.errors import UnsupportedError
from onelaunch.train.loop import StopSwitch
from onelaunch.train.progress import Progress

CPU = torch.device("cpu")
ROWS, CHECKED_STEPS = 8192, 50
ENDLESS = 2**20  # epochs: more than any benchmark runs
TOLERANCE = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 2e-2}  # of each checked loss, relative to float64


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
    run = workload.checked.run(CPU, rows=ROWS, steps=CHECKED_STEPS)
    expected = reference_losses(run, CHECKED_STEPS)
    session = CpuSession(run, {})
    got = torch.cat([segment.losses for segment in session.segments(0, StopSwitch(Progress()))])
    session.close()
    gap, bound = worst_relative(got.tolist(), expected), TOLERANCE[workload.precision]
    assert gap <= bound, f"losses differ from float64 by {gap:.2g} relative at a step, more than {bound:g}"


def _trial(workload: Workload) -> Trial:
    torch.manual_seed(0)
    torch.compiler.reset()  # otherwise the networks of earlier cases count towards the limit of recompilations
    run = workload.run(CPU, rows=ROWS, epochs=ENDLESS)
    if reason := ENGINE.unsupported_reason(run):
        raise UnsupportedError(reason)
    steps = run.spec.steps_per_epoch
    theirs = replace(run, spec=replace(run.spec, precision="fp32")) if workload.precision == "tf32" else run
    peers: dict[str, Work] = {
        "torch eager": functools.partial(loop(theirs), steps),
        SCAN: functools.partial(made_when_called(lambda: scan(theirs, steps, unroll=1)), steps),
    }
    if workload.kind == "mlp" and workload.precision != "bf16":
        peers["scikit-learn"] = _scikit_learn_epoch(run, workload)
    flops = ROWS * workload.flops_per_row if workload.precision == "fp32" else None  # the bound is that of fp32
    compiled = {"torch.compile": functools.partial(loop(theirs, "default"), steps)}  # 30 s to compile
    return Trial(_ours(run), lambda: _check(workload), peers, slow_peers=compiled, units=steps, floor_flops=flops)


def _register(workload: Workload) -> None:
    network, batch, optimizer = workload.network, workload.batch, workload.optimizer
    kind = "" if workload.kind == "mlp" else f"{workload.kind}/"
    precision = workload.precision
    setting = f"{network}{' with ' * bool(kind)}{kind[:-1]}, batch {batch}, {optimizer}, {precision}"
    name = f"cpu/{kind}{network}/{batch}/{optimizer}" + (f"/{precision}" if precision != "fp32" else "")
    case(name, "cpu", f"{setting}: an epoch of {ROWS} rows")(lambda: _trial(workload))


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
    *(
        Workload(widths, batch, precision=precision)
        for precision in ("tf32", "bf16")
        for widths, batch in (((784, 784, 784, 784, 10), 64), ((784, 512, 512, 10), 128))
    ),
):
    _register(_workload)


def _start_trial(starts: Sequence[Workload], seen: Sequence[Workload] = ()) -> Trial:
    """The start of a session with no code in memory, for each of `starts` in turn. On disk is the code of the networks `seen`.

    Programs (lists of commands, not code) stay in memory from one start to the next.
    """
    torch.manual_seed(0)
    keep = tempfile.TemporaryDirectory(prefix="onelaunch-bench-")
    folder = Path(keep.name)
    runs = itertools.cycle([workload.run(CPU, rows=ROWS, epochs=1) for workload in starts])

    def session(run: Run) -> None:
        CpuSession(run, {}, cache_folder=folder).close()

    for workload in seen:
        session(workload.run(CPU, rows=ROWS, epochs=1))
    known = set(folder.iterdir())

    def start() -> None:
        assert keep.name  # the folder exists as long as this function
        for entry in set(folder.iterdir()) - known:
            entry.unlink()
        library.cache_clear()
        session(next(runs))

    def check() -> None:
        start()
        assert any(folder.iterdir()), f"no code was kept in {folder}"

    return Trial(ours=start, check=check)


_SEEN = Workload((784, 128, 128, 128, 10), 32)
_STARTS: dict[str, tuple[str, list[Workload], list[Workload]]] = {
    "first": ("784-128-128-128-10, no network seen before", [_SEEN], []),
    "new-width": ("other widths than those seen", [Workload((784, w, w, 10), 32) for w in range(100, 116)], [_SEEN]),
    "new-depth": ("other depths than those seen", [Workload((784, *[64] * n, 10), 32) for n in range(1, 6)], [_SEEN]),
    "new-optimizer": ("784-128-128-128-10 with Adam, after SGD", [replace(_SEEN, optimizer="adam")], [_SEEN]),
    "cached": ("784-128-128-128-10, seen before: its code is on disk", [_SEEN], [_SEEN]),
}
for _name, (_about, _starts, _seen) in _STARTS.items():
    case(f"cpu/start/{_name}", "cpu", _about, unit="start")(functools.partial(_start_trial, _starts, _seen))
