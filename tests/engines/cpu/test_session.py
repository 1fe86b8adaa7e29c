"""The engine's side of the contract: segments, stops, snapshots, resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.cpu.session import CpuSession
from tests.engines.cpu.runs import Bystander, copy_of, data, make
from tests.pairwise import cases

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "adam": {"optimizer": "adam", "lr": 3e-3, "schedule": "cosine"},
    "rmsprop": {"optimizer": "rmsprop", "lr": 1e-3, "momentum": 0.9},
}


def run_with(**options: Any) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 40), nn.BatchNorm1d(40, momentum=None), nn.SiLU(), nn.Dropout(0.2), nn.Linear(40, 3)
    )
    x, y = data("cross_entropy", 100, 20, 3)
    return make(model, x, y, (x[:40], y[:40]), **{"epochs": 3, "batch_size": 16, **options})


def test_segments_are_epochs(cache_folder: Path) -> None:
    run = run_with()
    session = CpuSession(run, {}, cache_folder=cache_folder)
    segments = list(session.segments(0, Bystander()))
    session.close()
    assert [(segment.first_step, len(segment.losses)) for segment in segments] == [(0, 7), (7, 7), (14, 7)]
    assert all(segment.validation and segment.validation.accuracy is not None for segment in segments)
    assert all(segment.losses.dtype == torch.float32 and segment.losses.device.type == "cpu" for segment in segments)
    assert session.precision == "fp32"
    assert session.allocations == {"arena": 1}


def test_a_run_in_steps_ends_in_the_middle_of_an_epoch(cache_folder: Path) -> None:
    session = CpuSession(run_with(epochs=None, steps=10), {}, cache_folder=cache_folder)
    segments = list(session.segments(0, Bystander()))
    session.close()
    assert [len(segment.losses) for segment in segments] == [7, 3]
    assert segments[-1].validation is not None


def test_mse_has_no_accuracy(cache_folder: Path) -> None:
    x, y = data("mse", 30, 4, 2)
    session = CpuSession(
        make(nn.Sequential(nn.Linear(4, 2)), x, y, (x, y), loss="mse", epochs=1), {}, cache_folder=cache_folder
    )
    segment = next(iter(session.segments(0, Bystander())))
    session.close()
    assert segment.correct is None
    assert segment.validation is not None
    assert segment.validation.accuracy is None


@pytest.mark.parametrize(("optimizer", "stop_at", "partitions"), cases(tuple(OPTIMIZERS), (3, 7, 9, 16), (1, 2)))
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    optimizer: str, stop_at: int, partitions: int, cache_folder: Path
) -> None:
    run = run_with(**OPTIMIZERS[optimizer])
    whole = copy_of(run)
    session = CpuSession(whole, {}, cache_folder=cache_folder, partitions=partitions)
    losses = torch.cat([segment.losses for segment in session.segments(0, Bystander())])
    state = session.snapshot()
    session.close()

    first = copy_of(run)
    session = CpuSession(first, {}, cache_folder=cache_folder, partitions=partitions)
    session._call_steps = lambda: 1  # type: ignore[method-assign]
    done, taken = 0, []

    class Watch:
        """A Monitor that requests the stop after exactly `stop_at` steps."""

        @property
        def stop(self) -> bool:
            return session._done >= stop_at

        def report(self, step: int, loss: float, correct: int | None) -> None:
            assert step <= stop_at

    for segment in session.segments(0, Watch()):
        taken.append(segment.losses)
        done += len(segment.losses)
        if done >= stop_at:
            break
    assert done == stop_at
    saved = session.snapshot()
    session.close()

    second = copy_of(first)
    session = CpuSession(second, saved, cache_folder=cache_folder, partitions=partitions)
    taken += [segment.losses for segment in session.segments(done, Bystander())]
    resumed_state = session.snapshot()
    session.close()
    assert torch.equal(torch.cat(taken), losses)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert state.keys() == resumed_state.keys()
    assert all(torch.equal(state[name], resumed_state[name]) for name in state)


def test_a_stop_ends_the_segment_at_a_step_and_without_validation(cache_folder: Path) -> None:
    session = CpuSession(run_with(), {}, cache_folder=cache_folder)
    session._call_steps = lambda: 2  # type: ignore[method-assign]
    monitor = Bystander()
    monitor.stop = True
    segment = next(iter(session.segments(0, monitor)))
    session.close()
    assert len(segment.losses) == 2
    assert segment.validation is None
    assert monitor.reports[-1][0] == 2


def test_a_loss_that_is_not_finite_ends_the_segment(cache_folder: Path) -> None:
    session = CpuSession(run_with(lr=1e30), {}, cache_folder=cache_folder)
    session._call_steps = lambda: 1  # type: ignore[method-assign]
    segment = next(iter(session.segments(0, Bystander())))
    session.close()
    assert not segment.losses.isfinite().all()
    assert len(segment.losses) < 7


def test_snapshots_have_the_names_of_the_contract_and_write_into_the_model(cache_folder: Path) -> None:
    run = run_with(optimizer="adam")
    weight = run.model[0].weight  # type: ignore[index]
    before = weight.detach().clone()
    session = CpuSession(run, {}, cache_folder=cache_folder)
    assert all((tensor == 0).all() for tensor in session.snapshot().values())
    assert torch.equal(before, weight)
    next(iter(session.segments(0, Bystander())))
    state = session.snapshot()
    session.close()
    names = [name for name, _ in run.model.named_parameters()]
    assert set(state) == {f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in names}
    assert all(state[f"exp_avg.{name}"].shape == p.shape for name, p in run.model.named_parameters())
    assert run.model[0].weight is weight  # type: ignore[index]
    assert not torch.equal(before, weight)
    assert int(run.model[1].num_batches_tracked) == 7  # type: ignore[index]


def test_a_session_that_trained_no_step_leaves_the_model_alone(cache_folder: Path) -> None:
    x, y = data("cross_entropy", 20, 5, 3)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model(x)
    versions = {name: tensor._version for name, tensor in model.state_dict(keep_vars=True).items()}
    CpuSession(make(model, x, y, steps=4), {}, cache_folder=cache_folder).close()
    assert int(model.state_dict()["1.num_batches_tracked"]) == 1
    assert {name: tensor._version for name, tensor in model.state_dict(keep_vars=True).items()} == versions
