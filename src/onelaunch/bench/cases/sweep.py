"""Many networks at once: a grid search with folds on a CPU, and hundreds of members on a GPU, against JAX, torch.func and
scikit-learn. Times are per fit on the CPU, and per step of one member on the GPU."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.cases.train import TOLERANCE
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.peers_sweep import TorchVmap, jax_vmap_scan, scikit_learn_search
from onelaunch.bench.peers_torch import reference_losses, worst_relative
from onelaunch.bench.workload import Workload
from onelaunch.data import load
from onelaunch.engines import choose
from onelaunch.engines.contract import Run
from onelaunch.engines.members import MemberResult, MembersEngine, MemberTask
from onelaunch.errors import UnsupportedError
from onelaunch.sweep.active import Switch
from onelaunch.sweep.sweep import sweep
from onelaunch.train.fit import fit
from onelaunch.train.mlp import mlp

EPOCHS, BATCH, FOLDS = 10, 32, 5
GRID: dict[str, list[Any]] = {  # 240 candidates
    "lr": np.geomspace(1e-4, 1e-1, 12).tolist(),
    "weight_decay": [0.0, 1e-6, 1e-5, 1e-4, 1e-3],
    "betas": [(0.9, 0.999), (0.8, 0.999), (0.9, 0.99), (0.95, 0.999)],
}
PEER_GRID: dict[str, list[Any]] = {"learning_rate_init": np.geomspace(1e-4, 1e-1, 4).tolist(), "alpha": [1e-4]}
ALONE = 20  # fits one after another
ROWS, PEER_STEPS, CHECKED_STEPS, CHECKED = 61_440, 250, 100, (0, 1, -1)
STEPS, FEWER_STEPS = 40_000, 10_000  # per call: as long as a run of `onelaunch bench train`, and for much work
SAMPLES = 8  # with fewer, one slow sample is the spread


def digits_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _seconds_per(units: int, work: Work) -> Work:
    def timed() -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) / units

    return timed


@case(
    "sweep/digits", "sweep",
    "64-32-10, Adam, batch 32, 10 epochs on scikit-learn's digits: 240 candidates, 5 folds each, on the CPU", unit="fit",
)  # fmt: skip
def digits() -> Trial:
    data = load("digits")
    x, y = data.x.reshape(len(data.x), -1).astype(np.float32), data.y
    options: dict[str, Any] = {"epochs": EPOCHS, "batch_size": BATCH, "engine": "cpu", "progress": False}
    run = functools.partial(sweep, digits_model, x, y, folds=FOLDS, **options)
    count = FOLDS * int(np.prod([len(values) for values in GRID.values()]))
    held = len(x) // FOLDS
    notes: dict[str, str] = {}

    def alone() -> None:
        for number in range(ALONE):
            torch.manual_seed(0)
            lr = GRID["lr"][number % len(GRID["lr"])]
            fit(digits_model(), x[held:], y[held:], validation=(x[:held], y[:held]), lr=lr, **options)

    def check() -> None:
        """A member has the bits of a single run, and the search finds what scikit-learn's finds."""
        small = sweep(digits_model, x, y, grid={"lr": GRID["lr"][::4]}, validation=(x[:held], y[:held]), **options)
        torch.manual_seed(0)
        history = fit(digits_model(), x, y, validation=(x[:held], y[:held]), lr=GRID["lr"][4], **options)
        assert small.histories[1].losses == history.losses, "a member's losses are not those of a single run"
        ours = run(grid={"lr": PEER_GRID["learning_rate_init"], "weight_decay": [1e-4]})
        theirs = _scikit_learn(x, y)
        notes["best accuracy"] = f"{100 * ours.best.mean:.1f} %, scikit-learn {100 * theirs.best_score_:.1f} %"
        notes["best learning rate"] = (
            f"{ours.best.parameters['lr']:g}, scikit-learn {theirs.best_params_['learning_rate_init']:g}"
        )
        assert ours.best.mean > theirs.best_score_ - 0.03, notes["best accuracy"]

    peer_fits = FOLDS * int(np.prod([len(values) for values in PEER_GRID.values()]))
    return Trial(
        ours=_seconds_per(count, lambda: run(grid=GRID)), check=check, notes=notes,
        peers={
            "onelaunch, one after another": _seconds_per(ALONE, alone),
            "scikit-learn GridSearchCV, n_jobs=2": _seconds_per(peer_fits, lambda: _scikit_learn(x, y)),
        },
        self_timed=True, repeats=SAMPLES,
    )  # fmt: skip


def _scikit_learn(x: Any, y: Any) -> Any:
    return scikit_learn_search(x, y, PEER_GRID, epochs=EPOCHS, batch=BATCH, folds=FOLDS)


def member_runs(workload: Workload, device: torch.device, members: int, steps: int, engine: str = "auto") -> list[Run]:
    """Runs of their own weights and seeds on the same rows."""
    base = workload.run(device, rows=ROWS, engine=engine, steps=steps)
    return [
        replace(base, model=mlp(workload.widths, seed=seed).to(device), spec=replace(base.spec, seed=seed))
        for seed in range(members)
    ]


def train_together(runs: Sequence[Run]) -> list[MemberResult]:
    """Train all runs to their end with an engine that takes many."""
    engine, _ = choose(runs[0])
    if not hasattr(engine, "train_members"):
        raise UnsupportedError(f"the {engine.name} engine trains one member after another")
    tasks = [MemberTask(number, run, 0, run.spec.total_steps) for number, run in enumerate(runs)]
    return list(cast(MembersEngine, engine).train_members(tasks, Switch()))


def check_members(workload: Workload, device: torch.device, members: int, engine: str = "auto") -> None:
    """Compare the losses of some members with a float64 loop from the same weights over the same rows."""
    runs = member_runs(workload, device, members, CHECKED_STEPS, engine)
    references = {number % members: reference_losses(runs[number], CHECKED_STEPS) for number in CHECKED}
    results = {result.index: result.segments for result in train_together(runs)}
    assert len(results) == members, f"{len(results)} of {members} members came back"
    found = {number % members: torch.cat([part.losses for part in results[number % members]]) for number in CHECKED}
    for number, reference in references.items():
        gap, bound = worst_relative(found[number].tolist(), reference), TOLERANCE[workload.precision]
        assert gap <= bound, f"losses of member {number} differ from float64 by {gap:.2g} relative, more than {bound:g}"


def _trial(workload: Workload, members: int) -> Trial:
    device = cuda_device()
    steps = STEPS if members * workload.flops_per_row * workload.batch < 5e9 else FEWER_STEPS
    runs = member_runs(workload, device, members, steps, "resident")

    def ours() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        train_together(runs)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / (members * steps)

    def scan(unroll: int) -> Work:
        made: list[Any] = []

        def work() -> float:
            if not made:
                made.append(jax_vmap_scan(runs, PEER_STEPS, unroll))
            begin = time.perf_counter()
            made[0]()
            return (time.perf_counter() - begin) / (members * PEER_STEPS)

        return work

    def captured() -> Work:
        made: list[TorchVmap] = []

        def work() -> float:
            if not made:
                made.append(TorchVmap(runs, PEER_STEPS))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            made[0](PEER_STEPS)
            torch.cuda.synchronize()
            return (time.perf_counter() - begin) / (members * PEER_STEPS)

        return work

    peers: dict[str, Work] = {f"JAX vmap in scan, unroll {unroll}": scan(unroll) for unroll in (1, 4, 10)}
    peers["torch.func vmap, CUDA graph"] = captured()
    return Trial(
        ours=ours, check=lambda: check_members(workload, device, members, "resident"), peers=peers,
        floor_flops=workload.batch * workload.flops_per_row, floor_dtype="bf16", cuda=True, self_timed=True, repeats=SAMPLES,
    )  # fmt: skip


for _workload in (
    Workload((16, 64, 64, 2), 32, "adam", "bf16"),
    Workload((54, 128, 128, 7), 128, "adam", "bf16"),
    Workload((784, 128, 128, 128, 10), 32, "adam", "bf16"),
    Workload((784, 128, 128, 128, 10), 32, "sgd", "bf16"),
):
    for _members in (512, 64):
        _about = (
            f"{_members} members of {_workload.network}, batch {_workload.batch}, {_workload.optimizer}, bf16: "
            "one step of one member"
        )
        _name = f"sweep/{_workload.network}/{_workload.batch}/{_workload.optimizer}/{_members}"
        case(_name, "sweep", _about)(functools.partial(_trial, _workload, _members))
