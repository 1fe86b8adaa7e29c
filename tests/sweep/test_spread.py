"""Sweeps through joblib: what Ctrl-C keeps, in this process alone and in its whole process group."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.errors import OnelaunchError
from onelaunch.sweep.active import Switch
from onelaunch.sweep.driver import Driver
from onelaunch.sweep.spread import MAX_CHUNK, LostWorkerError, _lost_worker, as_they_come, in_chunks, watched
from tests.conftest import ROOT
from tests.sweep.models import make_model, rows, same_weights

joblib = pytest.importorskip("joblib")
ThreadingBackend = joblib.parallel.ThreadingBackend
MEMBERS = 400


def long_sweep(**arguments: Any) -> ol.Sweep:
    grid = {"seed": range(MEMBERS)}
    return ol.sweep(make_model, *rows(), grid=grid, epochs=500, progress=False, n_jobs=2, **arguments)


def interrupt_after_the_first(send: Any) -> None:
    keep = Driver._keep

    def keep_and_interrupt(self: Driver, *arguments: Any) -> None:
        keep(self, *arguments)
        if len(self.records) == 1:
            send()

    Driver._keep = keep_and_interrupt  # type: ignore[method-assign]


def test_ctrl_c_in_the_parent_keeps_what_is_finished(monkeypatch, tmp_path):
    monkeypatch.setattr(Driver, "_keep", Driver._keep)  # put back at the end
    interrupt_after_the_first(lambda: os.kill(os.getpid(), signal.SIGINT))
    with joblib.parallel_config("loky"):
        result = long_sweep(checkpoint=tmp_path / "kept")
    assert result.interrupted
    assert 0 < len(result.records) < MEMBERS
    assert (tmp_path / "kept").exists()


GROUP = """
import os, signal
from tests.sweep.test_spread import interrupt_after_the_first, long_sweep
interrupt_after_the_first(lambda: os.killpg(0, signal.SIGINT))
result = long_sweep()
print(result.interrupted, len(result.records))
"""


def test_ctrl_c_in_the_process_group_keeps_what_is_finished():
    ran = subprocess.run(
        [sys.executable, "-c", GROUP], cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        start_new_session=True, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    interrupted, count = ran.stdout.split()
    assert interrupted == "True"
    assert 0 < int(count) < MEMBERS


def doubled(task: int, items: Any) -> list[int]:
    return [task * item for item in items]


@pytest.mark.parametrize("generates", [True, False])  # whether the backend returns results as they come
def test_chunks_are_small_and_in_order(generates, monkeypatch):
    monkeypatch.setattr(ThreadingBackend, "supports_return_generator", generates)
    items = range(10 * MAX_CHUNK)
    with joblib.parallel_config("threading"):
        assert in_chunks(doubled, 2, items, 2) == [2 * item for item in items]
        sizes = [len(part) for _, part in as_they_come(doubled, 2, items, 2)]
    assert sum(sizes) == len(items)
    assert max(sizes) <= MAX_CHUNK


def broken(task: Switch, items: Any) -> list[int]:
    task.stop = task.steps == 1  # the Switch of the caller, since the backend is threads
    raise BrokenProcessPool


def test_a_broken_pool_after_a_stop_is_the_end():
    with joblib.parallel_config("threading"):
        stopped = Switch(steps=1)
        assert list(as_they_come(broken, stopped, range(9), 2, stopped)) == []
        with pytest.raises(LostWorkerError):
            list(as_they_come(broken, Switch(), range(9), 2))


@dataclasses.dataclass(frozen=True)
class Deadly:
    """Kills the worker that makes its network."""

    parent: int

    def __call__(self) -> nn.Module:
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return make_model()


def test_a_worker_that_is_killed_is_one_line(tmp_path):
    reason = "^n_jobs=2: a worker process ended, perhaps for lack of memory: pass a smaller number"
    arguments = {"grid": {"seed": range(2)}, "epochs": 1, "progress": False, "n_jobs": 2}
    kept = tmp_path / "kept"
    message = rf"{reason}; the same call continues with checkpoint='.*kept'$"
    with joblib.parallel_config("loky"), pytest.raises(LostWorkerError, match=message):
        ol.sweep(Deadly(os.getpid()), *rows(), checkpoint=kept, **arguments)
    result = ol.sweep(Deadly(os.getpid()), *rows(), checkpoint=kept, **{**arguments, "n_jobs": None})
    assert len(result.records) == 2


def test_a_task_that_a_worker_cannot_read_is_one_line():
    error = BrokenProcessPool("A task has failed to un-serialize.")
    error.__cause__ = Exception('\n"""\nTraceback (most recent call last):\nValueError: no number\n"""')
    found = str(_lost_worker(2, error))
    assert found.startswith("n_jobs=2: a worker process cannot read its task (ValueError: no number): pass ")


def test_a_model_that_cannot_be_sent_is_one_line():
    message = r"^n_jobs=2 cannot send its task to a worker \(Can't pickle [^\n]*\): define functions in a module[^\n]*$"
    with joblib.parallel_config("multiprocessing"), pytest.raises(OnelaunchError, match=message):
        ol.sweep(lambda: make_model(), *rows(), grid={"seed": range(2)}, epochs=1, progress=False, n_jobs=2)


def test_a_worker_hears_of_a_stop(tmp_path):
    switch = Switch(stop_file=tmp_path / "stop")
    with watched(tmp_path / "stop") as before:
        assert not before.stop
        switch.interrupt()
    with watched(tmp_path / "stop") as after:
        assert after.stop


def wide_model(width: int = 512) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def failing_model(width: int) -> nn.Module:
    if width == 3:
        raise ValueError("no")
    return make_model(width)


def test_jobs_have_the_bits_of_this_process():
    """A worker of joblib has fewer threads; a large network keeps the partitions that it has here."""
    random = np.random.default_rng(5)
    x = random.standard_normal((128, 64)).astype(np.float32)
    y = x[:, :3].argmax(1)
    arguments = {"grid": {"seed": range(2)}, "epochs": 2, "batch_size": 64, "engine": "cpu", "progress": False}
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        here = ol.sweep(wide_model, x, y, **arguments)
        with joblib.parallel_config("loky"):
            there = ol.sweep(wide_model, x, y, n_jobs=2, **arguments)
    finally:
        torch.set_num_threads(before)
    for index in range(2):
        assert there.histories[index].losses == here.histories[index].losses
        assert same_weights(there.model(index), here.model(index))


class Noisy(nn.Module):
    """Draws from PyTorch's global generator, and lets other threads go on in the meantime."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(rows()[0].shape[1], width)
        time.sleep(1e-3)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        time.sleep(1e-3)
        return self.last(hidden + torch.randn_like(hidden))


def test_threads_as_workers_have_the_bits_of_one():
    """The members of the eager engine seed PyTorch's generators, which the threads of a process share."""
    arguments = {"grid": {"seed": range(8)}, "epochs": 2, "batch_size": 32, "engine": "eager", "progress": False}
    here = ol.sweep(Noisy, *rows(), **arguments)
    with joblib.parallel_config("threading"):
        there = ol.sweep(Noisy, *rows(), n_jobs=4, **arguments)
    assert [found.losses for found in there.histories] == [found.losses for found in here.histories]


def test_a_candidate_that_fails_in_a_job_is_a_row():
    with joblib.parallel_config("loky"):
        result = ol.sweep(failing_model, *rows(), grid={"width": [3, 8]}, epochs=1, progress=False, n_jobs=2)
    assert result.failures == {0: "make_model raised ValueError: no"}
    assert result.best.parameters == {"width": 8}
